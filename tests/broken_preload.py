"""A module that cannot be imported, for the tests of the grader pool."""

import no_such_module_anywhere  # noqa: F401
