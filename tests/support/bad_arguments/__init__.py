"""One table of wrong arguments and what is said about them: tests/ops runs all of it against the planners, the tests of
a front-end run a sample of it to see that type and text arrive."""

from tests.support.bad_arguments import matmul, moe, routing
from tests.support.bad_arguments.case import Case

#: Every case, in the order of the ops.
CASES: tuple[Case, ...] = (*routing.CASES, *matmul.CASES, *moe.CASES)


def sample(*, without: tuple[str, ...] = ()) -> list[Case]:
    """The first case of every kind of every op, but sizes no machine has and kinds a front-end cannot say."""
    found = {(case.op, case.kind): case for case in reversed(CASES) if case.kind not in ("size", *without)}
    return [case for case in CASES if found.get((case.op, case.kind)) is case]
