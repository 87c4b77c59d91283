"""The two exceptions a caller can meet."""

#: The most characters of a message, and of its end. A longer message keeps its beginning, and the fix at its end.
_MOST_CHARACTERS, _END = 4000, 800


def _shortened(message: str) -> str:
    if len(message) <= _MOST_CHARACTERS:
        return message
    return f"{message[: _MOST_CHARACTERS - _END - 5]} ... {message[-_END:]}"


# Messages are shortened when they are read: Dynamo cannot trace an exception's constructor that calls its base's.
class InvalidInput(ValueError):
    """The caller is wrong. The message names the argument, the expectation, the value and the fix."""

    def __str__(self) -> str:
        return _shortened(super().__str__())


class Unsupported(NotImplementedError):
    """The request is meaningful but cannot be honoured here. The message gives the reason."""

    def __str__(self) -> str:
        return _shortened(super().__str__())
