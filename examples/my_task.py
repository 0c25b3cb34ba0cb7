"""A whole task in one small file: write a word backwards, scored by the letters that are in place.

ngu train --task examples/my_task.py:MyTask --model.path MODEL
"""

from random import Random

from nevergiveup.types import Completion, Prompt, Score

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class MyTask:
    def prompts(self, split: str) -> list[Prompt]:
        """The prompts of "train" or "test"; the latter may be empty. The same at every call, each with an id of its own."""
        rng = Random(split)
        words = ["".join(rng.sample(LETTERS, k=n)) for n in (2, 3, 4, 5) for _ in range(50)]
        return [
            Prompt(
                id=f"{split}-{i}",
                messages=({"role": "user", "content": f"Write {word} backwards. Write only that."},),
                answer=word[::-1],  # whatever grade needs
            )
            for i, word in enumerate(words)
        ]

    def grade(self, prompt: Prompt, completion: Completion) -> Score:
        """The reward, 0 to prompt.max_reward (1 unless set). Runs in a process that is killed when it takes too long."""
        said = completion.text.strip()
        n_right = sum(a == b for a, b in zip(said, prompt.answer, strict=False))
        reason = "right" if said == prompt.answer else "different"
        return Score(n_right / max(len(said), len(prompt.answer)), reason)
