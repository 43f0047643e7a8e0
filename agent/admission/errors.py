"""Why a model is not taken."""


class InvalidModel(Exception):
    """The model's files say something that is served nowhere; the message names it, and what would be right."""


class CodeRefused(Exception):
    """The model may not be in this node's Triton beside what is there, because one of them has code.
    Another node may take it."""
