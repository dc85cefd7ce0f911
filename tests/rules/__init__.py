"""The rules without a server: flows, names, and every interleaving of the protocol."""
