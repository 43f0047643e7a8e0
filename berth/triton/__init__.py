"""The node's Triton server as Berth sees it: its admin calls, its keys, its errors."""
