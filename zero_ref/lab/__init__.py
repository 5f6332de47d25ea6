"""Running, measuring, looking: everything a notebook needs beside the optimizer itself.

Real ranks from a cell (`ranks`), the same optimizer on ranks inside one process (`virtual`), what really
happened (`meter`), a language model to train (`train`), pictures (`plots`).
"""
