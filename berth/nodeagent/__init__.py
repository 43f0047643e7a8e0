"""The client side of the node agent's API, for the loader and the proxy."""
