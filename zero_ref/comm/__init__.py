"""Communication between ranks: the calls, and the agreements that ranks reach before and between them."""
