"""A reward function of one's own: how close a written number is.

    ngu train --data examples/my_rows.jsonl --reward examples/my_reward.py:my_reward --model.path MODEL

It is called with the arguments that it names, of: prompt, messages, completion, answer, finish, n_tokens, and the columns
of the row (here `tolerance`). It returns a number up to task.max_reward (1 unless set), or None when it cannot decide.
"""

import re


def my_reward(completion: str, answer: float, tolerance: float = 0.0) -> float | None:
    """1 within the tolerance, else less the further it is off."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
    if not numbers:
        return 0.0
    error = abs(float(numbers[-1]) - answer)
    return 1.0 if error <= tolerance else 1 / (2 + error)


def brevity(n_tokens: int) -> float:
    """A second part: --reward "examples/my_reward.py:my_reward + 0.1*examples/my_reward.py:brevity"."""
    return 1 / (1 + n_tokens / 100)
