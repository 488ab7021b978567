"""Errors of the command line itself, such as an unknown option."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from gpt_cli.cli.help import GROUPS
from gpt_cli.errors import InputError, did_you_mean

# Flags of llama.cpp, mlx_lm, llm, vLLM and transformers, after what each is called here.
_OTHER_NAMES = {
    "--max-tokens": "--n-predict --predict --max-new-tokens --max-length",
    "--stop": "--reverse-prompt --extra-eos-token --stop-strings -r",
    "--overflow shift": "--keep --context-shift --max-kv-size",
    "--overflow error": "--no-context-shift",
    "--typical-p": "--typical",
    "--no-repeat-ngram": "--no-repeat-ngram-size",
    "--repeat-penalty": "--repetition-penalty",
    "--beams": "--num-beams",
    "--samples": "--num-return-sequences",
    "--grammar": "--grammar-file",
    "--json-schema": "--json-schema-file --schema --schema-multi -j",
    "--escape": "-e",
    "--echo": "--display-prompt",
    "--stats": "--usage --perf --show-timings -u",
    "--file": "--binary-file --in-file --fragment -bf",
    "--model": "--hf-repo --hf-file --model-url --model-path",
    "--adapter": "--lora --lora-scaled --lora-modules --enable-lora --adapter-path",
    "--device": "--n-gpu-layers --gpu-layers --main-gpu",
    "--dtype": "--quantization --quantize --kv-bits",
    "--speculate": "--model-draft --draft-model --draft --draft-max --num-draft-tokens",
    "--quiet": "--log-disable",
    "--threads": "--threads-batch -t",
    "--batch-size": "--max-num-seqs --max-batch-size --parallel -b",
    "--name": "--served-model-name --alias",
    "--unix-socket": "--uds",
    "--cors": "--allowed-origins --cors-origins",
}
# Flags of theirs without a counterpart, after the reason.
_NO_COUNTERPARTS = {
    "the prompt, or the text, is an argument": "--prompt --text -p",
    "a base model has no chat: write instructions and turns into the prompt": "--system "
    "--system-prompt --conversation --no-conversation --interactive --interactive-first "
    "--chat-template --ignore-chat-template --prefill-response --cid --continue -i -cnv",
    "its options are flags of their own, such as --temperature 0.7": "--option -o",
    "the prompt is only printed with --echo": "--no-display-prompt",
    "the text has no colors": "--color --colors",
    "a penalty applies to the whole text": "--repeat-last-n",
    "there is no Mirostat; --typical-p keeps the surprise near its mean": "--mirostat "
    "--mirostat-lr --mirostat-ent",
    "there is no such filter; --min-p is another": "--xtc-probability --xtc-threshold --top-nsigma "
    "--top-n-sigma --adaptive-target --dynatemp-range",
    "there is no DRY; --no-repeat-ngram bans what was there": "--dry-multiplier --dry-base "
    "--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker",
    "the order of the filters is fixed": "--samplers --sampler-seq --sampling-seq",
    "the context is that of the model; generate --overflow continues past it": "--ctx-size "
    "--max-model-len --context-length -c",
    "--temperature 0 is greedy, any other value samples": "--do-sample --greedy",
    "the weights are read into memory once": "--mmap --no-mmap --mlock",
    "one device computes the model": "--tensor-parallel-size --pipeline-parallel-size "
    "--split-mode --tensor-split -tp",
    "it takes the memory that it needs": "--gpu-memory-utilization",
    "common beginnings of prompts are computed once anyway": "--prompt-cache --prompt-cache-file "
    "--prompt-cache-all --prompt-cache-ro --enable-prefix-caching --cache-prompt",
    "no code of a model is ever run": "--trust-remote-code",
    "nothing is logged": "--no-log",
    "the cache of models is HF_HOME": "--download-dir --cache-dir",
    "a token for the Hub is HF_TOKEN": "--hf-token --key",
    "the perplexity of a text is computed by gpt-cli score": "--perplexity --ppl",
}
_TEXT = re.compile(r"-(?!-?[a-z][a-z-]*(=|$))")  # begins with - and does not look like a flag


def usage_error(error: typer.TyperException, program: Any, arguments: Sequence[str]) -> InputError:
    """Return the error to show for an error of typer. It names the help of the command."""
    command = program
    path = ["gpt-cli"]
    for word in arguments:
        if word not in _commands(command):
            break
        command = _commands(command)[word]
        path.append(word)
    return InputError(f"{_complaint(error, command, arguments)}; see `{' '.join(path)} --help`")


def _commands(command: Any) -> Mapping[str, Any]:
    return getattr(command, "commands", {})


def _complaint(error: Any, command: Any, arguments: Sequence[str]) -> str:
    message = error.format_message()
    match type(error).__name__:
        case "NoSuchOption":
            return _no_option(error.option_name, command, arguments)
        case "BadOptionUsage":
            return f"{error.option_name} {'needs a' if 'requires' in message else 'takes no'} value"
        case "MissingParameter":
            param = error.param
            name = param.metavar if param.param_type_name == "argument" else param.opts[0]
            return f"{name} is missing"
    no_command = re.match(r"No such command (['\"])(.*?)\1", message)
    if no_command:
        name = no_command[2]
        near = did_you_mean(name, _commands(command))
        cure = "; to continue a text, use generate" if "generate" in _commands(command) else ""
        return f"there is no command {name}{near or cure}"
    extra = re.match(r"(?s)Got unexpected extra argument\S* \((.*)\)", message)
    if extra:
        return f"unexpected argument {extra[1]}"
    return "a command is missing" if message == "Missing command." else message


def _no_option(name: str, command: Any, arguments: Sequence[str]) -> str:
    """Return the message for an unknown option: the nearest known one, or what to do."""
    flags = []
    for param in command.params:
        if not param.hidden:
            flags += [*param.opts, *param.secondary_opts]
    where = _where(name, arguments)
    hint = _hint(where.removeprefix(" in ") or name, flags)
    if hint:
        return f"there is no option {name}{where}: {hint}"
    # The name of another command's flag is not a misspelling, nor is that of another program's.
    is_known = name.removeprefix("--") in " ".join(GROUPS.values()).split()
    is_known = is_known or name in " ".join(_OTHER_NAMES.values()).split()
    near = "" if is_known else did_you_mean(name, flags)
    cure = ""
    if any(word in _commands(command) for word in arguments):
        cure = "; options come after the command"
    elif where or any(map(_TEXT.match, arguments)):
        cure = "; put -- before a text that begins with -"
    return f"there is no option {name}{where}{near}{cure}"


def _hint(name: str, flags: Sequence[str]) -> str:
    """Return what to do without a flag of another program; "" if it is none."""
    if not name.startswith("--") and "--max-tokens" not in flags:
        return ""  # a letter may mean anything in a command that does not generate
    for flag, others in _OTHER_NAMES.items():
        if flag.split()[0] in flags and name in others.split():
            return f"use {flag}"
    for reason, others in _NO_COUNTERPARTS.items():
        if name in others.split():
            return reason
    return ""


def _where(name: str, arguments: Sequence[str]) -> str:
    """Return " in -abc" for the flag -b of the argument -abc; "" if it stands alone."""
    words = [word for word in arguments if re.match(f"-[^-]*{re.escape(name[1:])}", word)]
    return f" in {words[0]:.40}" if len(name) == 2 and words and words[0] != name else ""
