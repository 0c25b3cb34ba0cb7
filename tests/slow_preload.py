"""A module whose import takes for ever, for the tests of the grader pool."""

import time

time.sleep(1000)
