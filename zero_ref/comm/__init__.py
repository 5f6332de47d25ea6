"""What ranks say to each other: the calls, and what they agree on before and between them."""
