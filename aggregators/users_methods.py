"""Methods of users' own classes, whose errors become one sentence that names the class and the line."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from fed.errors import RunFailed, users_error_in_words

__all__ = ["explain_errors"]

_OURS = "fed"


def explain_errors(cls: type) -> None:
    """Have the methods of a user's class that override ours raise :class:`RunFailed` for any error of the user's.

    Checks (``check_local`` and the like) are left as they are: to raise is what they are for.

    Args:
        cls: class of a user, or of ours, whose methods stay as they are.
    """
    for name, method in [*vars(cls).items()]:
        is_users = inspect.isfunction(method) and not _is_ours(method)
        overrides = any(hasattr(base, name) for base in cls.__bases__)
        if is_users and overrides and not name.startswith(("_", "check")):
            setattr(cls, name, _explained(method))


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def explained(*given: Any, **named: Any) -> Any:
        try:
            return method(*given, **named)
        except Exception as error:
            if _is_ours(type(error)):  # a sentence already, or a sign that a caller of ours waits for
                raise
            module = "" if method.__module__ == "__main__" else f"{method.__module__}."
            raise RunFailed(users_error_in_words(error, f"{module}{method.__qualname__}")) from error

    return explained


def _is_ours(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] == _OURS
