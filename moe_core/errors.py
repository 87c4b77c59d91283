"""The two exceptions a caller can meet."""

#: Messages show values of others, of any length. Of a longer message the beginning stays, and the fix at its end.
_MOST_CHARACTERS, _END = 4000, 800


def _shortened(message: object) -> object:
    if not isinstance(message, str) or len(message) <= _MOST_CHARACTERS:
        return message
    return f"{message[: _MOST_CHARACTERS - _END - 5]} ... {message[-_END:]}"


class InvalidInput(ValueError):
    """The caller is wrong. The message names the argument, the expectation, the value and the fix."""

    def __init__(self, *message: object) -> None:
        super().__init__(*map(_shortened, message))


class Unsupported(NotImplementedError):
    """The request is meaningful but cannot be honoured here. The message gives the reason."""

    def __init__(self, *message: object) -> None:
        super().__init__(*map(_shortened, message))
