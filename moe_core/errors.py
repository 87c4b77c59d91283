"""The two exceptions a caller can meet."""

#: Messages show values of others, of any length. Of a longer message the beginning stays, and the fix at its end.
_MOST_CHARACTERS, _END = 4000, 800


def _shortened(message: str) -> str:
    if len(message) <= _MOST_CHARACTERS:
        return message
    return f"{message[: _MOST_CHARACTERS - _END - 5]} ... {message[-_END:]}"


# Shortened when they are read: Dynamo traces no constructor of an exception that calls that of its base.
class InvalidInput(ValueError):
    """The caller is wrong. The message names the argument, the expectation, the value and the fix."""

    def __str__(self) -> str:
        return _shortened(super().__str__())


class Unsupported(NotImplementedError):
    """The request is meaningful but cannot be honoured here. The message gives the reason."""

    def __str__(self) -> str:
        return _shortened(super().__str__())
