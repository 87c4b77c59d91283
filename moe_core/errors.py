"""The two exceptions a caller can meet."""


class InvalidInput(ValueError):
    """The caller is wrong. The message names the argument, the expectation, the value and the fix."""


class Unsupported(NotImplementedError):
    """The request is meaningful but cannot be honoured here. The message gives the reason."""
