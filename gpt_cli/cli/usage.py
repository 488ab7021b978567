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
    "--json-schema": "--json-schema-file --schema --schema-multi -j -jf",
    "--escape": "-e",
    "--echo": "--display-prompt",
    "--stats": "--usage --perf --show-timings -u",
    "--file": "--binary-file --in-file --fragment -bf",
    "--model": "--hf-repo --hf-file --model-url --model-path --docker-repo -hf -hfr -hff -mu -dr",
    "--adapter": "--lora --lora-scaled --lora-modules --enable-lora --adapter-path",
    "--device": "--n-gpu-layers --gpu-layers --main-gpu -ngl -mg -dev",
    "--edit": "--control-vector --control-vector-scaled --control-vector-layer-range",
    "--logit-bias": "-l",
    "--dtype": "--quantization --quantize --kv-bits",
    "--speculate": "--model-draft --draft-model --draft --draft-max --draft-min --num-draft-tokens "
    "--hf-repo-draft --lookup-cache-static --lookup-cache-dynamic -md -hfd -hfrd -lcs -lcd",
    "--quiet": "--log-disable",
    "--threads": "--threads-batch -t -tb",
    "--batch-size": "--max-num-seqs --max-batch-size --parallel --ubatch-size -b -np -ub",
    "--output": "--output-file",
    "--access-log": "--enable-log-requests",
    "--name": "--served-model-name --alias",
    "--unix-socket": "--uds",
    "--cors": "--allowed-origins --cors-origins",
}
# Flags of theirs without a counterpart, after the reason.
_NO_COUNTERPARTS = {
    "the prompt, or the text, is an argument": "--prompt --text -p",
    "a base model has no chat: write instructions and turns into the prompt": "--system "
    "--system-prompt --conversation --no-conversation --interactive --interactive-first "
    "--chat-template --chat-template-file --chat-template-kwargs --chat-template-config "
    "--ignore-chat-template --use-default-chat-template --prefill-response --cid --continue "
    "--system-prompt-file --single-turn --multiline-input --in-prefix --in-suffix --jinja "
    "--no-jinja --reasoning --reasoning-budget --reasoning-format --reasoning-parser -i -cnv "
    "-no-cnv -sys -sysf -st -mli -rea",
    "a base model calls no tools": "--tool --functions --tools-debug --tools-approve "
    "--chain-limit --enable-auto-tool-choice --tool-call-parser",
    "the model reads only text": "--attachment --attachment-type --image --audio --mmproj -mm -at",
    "the files of rows are arguments": "--input-file",
    "its options are flags of their own, such as --temperature 0.7": "--option -o",
    "the prompt is only printed with --echo": "--no-display-prompt",
    "the text has no colors": "--color --colors -co",
    "a penalty applies to the whole text": "--repeat-last-n",
    "there is no Mirostat; --typical-p keeps the surprise near its mean": "--mirostat "
    "--mirostat-lr --mirostat-ent",
    "there is no such filter; --min-p is another": "--xtc-probability --xtc-threshold --top-nsigma "
    "--top-n-sigma --adaptive-target --dynatemp-range --min-tokens-to-keep",
    "there is no DRY; --no-repeat-ngram bans what was there": "--dry-multiplier --dry-base "
    "--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker",
    "the order of the filters is fixed": "--samplers --sampler-seq --sampling-seq",
    "the context is that of the model; generate --overflow continues past it": "--ctx-size "
    "--max-model-len --context-length -c",
    "--temperature 0 is greedy, any other value samples": "--do-sample --greedy",
    "positions are learned, and cannot be scaled": "--rope-scaling --rope-scale --rope-freq-base "
    "--rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow "
    "--yarn-beta-fast --hf-overrides",
    "there is one way to compute attention": "--flash-attn --attention-backend --enforce-eager "
    "--swa-full -fa",
    "keys and values are cached in one type": "--cache-type-k --cache-type-v --kv-cache-dtype "
    "--kv-group-size --quantized-kv-start -ctk -ctv",
    "the weights are read into memory once": "--mmap --no-mmap --mlock --load-mode --direct-io "
    "--no-direct-io --repack --no-repack --load-format -lm -dio -ndio -nr",
    "one device computes the model": "--tensor-parallel-size --pipeline-parallel-size "
    "--data-parallel-size --split-mode --tensor-split --override-tensor --cpu-moe --n-cpu-moe "
    "--kv-offload --no-kv-offload --op-offload --no-op-offload --no-host --rpc -tp -pp -dp -sm -ts "
    "-ot -cmoe -ncmoe -kvo -nkvo",
    "--threads says how many cores compute": "--cpu-mask --cpu-range --cpu-strict --prio --poll "
    "--numa -Cr",
    "gpt-cli doctor names the device": "--list-devices",
    "it takes the memory that it needs": "--gpu-memory-utilization --cpu-offload-gb --swap-space "
    "--fit --fit-target --fit-ctx --max-num-batched-tokens -fit -fitt -fitc",
    "it does not warm up": "--warmup --no-warmup",
    "llguidance compiles all constraints": "--guided-decoding-backend",
    "TLS is the work of a proxy in front of the server": "--ssl-keyfile --ssl-certfile "
    "--ssl-key-file --ssl-cert-file",
    "common beginnings of prompts are computed once anyway": "--prompt-cache --prompt-cache-file "
    "--prompt-cache-all --prompt-cache-ro --enable-prefix-caching --cache-prompt",
    "no code of a model is ever run": "--trust-remote-code",
    "nothing is logged": "--no-log --log-file --log-colors --log-prefix --log-timestamps "
    "--log-verbosity --verbosity --disable-log-requests -lv",
    "the cache of models is HF_HOME": "--download-dir --cache-dir",
    "a token for the Hub is HF_TOKEN": "--hf-token --key -hft",
    "the perplexity of a text is computed by gpt-cli score": "--perplexity --ppl",
}
_OTHERS = {*" ".join([*_OTHER_NAMES.values(), *_NO_COUNTERPARTS.values()]).split()}
_TEXT = re.compile(r"-(?!-?[a-z][a-z-]*(=|$))")  # begins with - and does not look like a flag


def check_flags(program: Any, arguments: Sequence[str]) -> None:
    """Raise InputError for a flag such as -ngl of another program.

    It would be read as -n with the value "gl".
    """
    command, path = _command(program, arguments)
    takes_value = False  # the word before
    for word in arguments:
        if word == "--":
            return
        if re.fullmatch("-[a-zA-Z][a-z-]+", word) and word in _OTHERS and not takes_value:
            flags = _flags(command)
            if "--device" in flags:  # it computes
                hint = _hint(word, flags)
                cure = f": {hint}" if hint else ""
                raise InputError(f"there is no option {word}{cure}; see `{' '.join(path)} --help`")
        takes_value = any(
            word in (*param.opts, *param.secondary_opts) and not param.is_flag
            for param in command.params
            if param.param_type_name == "option"
        )


def usage_error(error: typer.TyperException, program: Any, arguments: Sequence[str]) -> InputError:
    """Return the error to show for an error of typer. It names the help of the command."""
    command, path = _command(program, arguments)
    return InputError(f"{_complaint(error, command, arguments)}; see `{' '.join(path)} --help`")


def _command(program: Any, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the command that arguments name, and the words of its name."""
    command = program
    path = ["gpt-cli"]
    for word in arguments:
        if word not in _commands(command):
            break
        command = _commands(command)[word]
        path.append(word)
    return command, path


def _flags(command: Any) -> list[str]:
    """Return the flags of a command."""
    shown = [param for param in command.params if not param.hidden]
    return [flag for param in shown for flag in (*param.opts, *param.secondary_opts)]


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
    flags = _flags(command)
    where = _where(name, arguments)
    hint = _hint(name, flags)
    if hint and not where:
        return f"there is no option {name}{where}: {hint}"
    # The name of another command's flag is not a misspelling, nor is that of another program's.
    is_known = name.removeprefix("--") in " ".join(GROUPS.values()).split()
    is_known = is_known or name in _OTHERS
    near = "" if is_known else did_you_mean(name, flags)
    cure = ""
    if any(word in _commands(command) for word in arguments):
        cure = "; options come after the command"
    elif where or any(map(_TEXT.match, arguments)):
        cure = "; put -- before a text that begins with -"
    return f"there is no option {name}{where}{near}{cure}"


def _hint(name: str, flags: Sequence[str]) -> str:
    """Return what to do without a flag of another program; "" if it is none."""
    if len(name) == 2 and "--max-tokens" not in flags:
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
