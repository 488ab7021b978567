"""The model `gpt-cli` for lm-evaluation-harness, which measures models on published tasks.

    python -m gpt_cli.lm_eval run --model gpt-cli --model_args model=tiny --tasks lambada_openai

is the command `lm-eval` with one more model. In Python, importing this module is enough:

    import gpt_cli.lm_eval
    import lm_eval

    lm_eval.simple_evaluate("gpt-cli", {"model": "tiny", "dtype": "int8"}, tasks=["lambada_openai"])

Prompts, windows and stop strings are those of lm-eval's model `hf`, so figures can be compared.
PyTorch is not needed, but lm-eval is: `pip install lm-eval`.
"""

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from gpt_cli.errors import GPTCLIError, InputError, counted
from gpt_cli.generation.generate import complete
from gpt_cli.generation.row import Request
from gpt_cli.loading import load
from gpt_cli.options.request import Options
from gpt_cli.scoring.score import measure_windows
from gpt_cli.texts.measures import log_probabilities, ranks
from gpt_cli.texts.text import Text

# The log-likelihood of a continuation, and whether greedy decoding gives it.
Likelihood: TypeAlias = tuple[float, bool]

_TOGETHER = 256  # requests in a call: neighbours, such as choices of a question, share prefixes


@register_model("gpt-cli")
class EngineLM(TemplateLM):
    """A model of gpt-cli with the interface of lm-eval.

    Args:
        model: a name or a folder, as for `gpt_cli.load`.
        device: as for `gpt_cli.load`; "cuda:0", the default of `lm-eval`, means "auto".
        batch_size: not used, because results do not depend on it; nor is `max_batch_size`.
        load_options: more keywords for `gpt_cli.load`, such as dtype, threads and revision.
    """

    max_gen_toks = 256  # the default of tasks

    def __init__(
        self,
        model: str = "gpt2",
        *,
        device: str = "cuda:0",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **load_options: Any,
    ):
        super().__init__()
        if "pretrained" in load_options:  # its name in lm-eval's other models
            raise InputError("pretrained is called model here: --model_args model=NAME")
        self.engine = load(model, device="auto" if device == "cuda:0" else device, **load_options)
        self.engine.loaded.refuse_edits("cannot be used with lm-eval")

    @property
    def max_length(self) -> int:
        """Return the context in tokens."""
        return self.engine.model.config.n_positions

    @property
    def eot_token_id(self) -> int:
        """Return the start token; raise InputError if the model has none."""
        return self.engine.model.config.start_token("a text of this task needs a token before it")

    @property
    def tokenizer_name(self) -> str:
        """Return the name of the tokenizer in lm-eval's caches."""
        return self.engine.name

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        """Refuse: a base model has no chat template."""
        raise InputError("GPT-2 has no chat template: leave out --apply_chat_template")

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        """Return the ids of a text; as in `hf`, <|endoftext|> is the special token."""
        return self.engine.tokenizer.encode(string, special=True)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods of whole texts after the start token.

        A text longer than the context is cut into full windows. A token is scored once.
        """
        strings = [request.args[0] for request in requests]
        windows = []
        indices = []  # of the text of each window
        for index, string in enumerate(strings):
            ids = self.tok_encode(string)
            for window in get_rolling_token_windows(
                ids, self.eot_token_id, self.max_length, context_len=1
            ):
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                indices.append(index)
        likelihoods = self._loglikelihood_tokens(windows, disable_tqdm)
        totals = [0.0] * len(strings)
        for index, (logprob, _) in zip(indices, likelihoods, strict=True):
            totals[index] += logprob
        for string, total in zip(strings, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[Likelihood]:
        """Score continuations after their contexts; the start of a long context is dropped."""
        texts = []
        for _, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                tokens = counted(len(continuation), "token")
                raise InputError(
                    f"a continuation has {tokens} of its own, and must have 1 to "
                    f"{self.max_length:,}: {self.engine.decode(continuation or context)!r:.60}"
                )
            # A context of white space is empty here: all of it moved to the continuation.
            ids = (context or [self.eot_token_id]) + continuation
            # The last token is predicted, and not read.
            ids = ids[-self.max_length - 1 :]
            texts.append(Text(ids, first=len(ids) - len(continuation)))
        likelihoods: list[Likelihood] = []
        label = "Running loglikelihood requests"
        measured = tqdm(self._measured(texts), label, len(texts), disable=disable_tqdm)
        for (pair, _, _), likelihood in zip(requests, measured, strict=True):
            likelihoods.append(likelihood)
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, likelihood)
        return likelihoods

    def _measured(self, texts: Sequence[Text]) -> Iterator[Likelihood]:
        """Yield the likelihoods of the continuations in texts."""
        loaded = replace(self.engine.loaded)  # with new prefixes
        measures = {"logprobs": log_probabilities, "ranks": ranks}
        for first in range(0, len(texts), _TOGETHER):
            for columns in measure_windows(loaded, texts[first : first + _TOGETHER], measures):
                yield math.fsum(columns["logprobs"]), max(columns["ranks"]) == 1

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts up to a stop string, which is left out.

        Sampled texts repeat with lm-eval's seed.
        """
        seed = random.getrandbits(32)
        arguments = [request.args for request in requests]
        rows = [
            self._request(context, options, seed, index)
            for index, (context, options) in enumerate(arguments)
        ]
        texts = []
        label = "Running generate_until requests"
        completions = complete(replace(self.engine.loaded), rows)  # with new prefixes
        shown = tqdm(completions, label, len(rows), disable=disable_tqdm)
        for request, completion in zip(arguments, shown, strict=True):
            self.cache_hook.add_partial("generate_until", request, completion.text)
            texts.append(completion.text)
        return texts

    def _request(self, context: str, gen_kwargs: dict[str, Any], seed: int, index: int) -> Request:
        """Return the request for a context, with lm-eval's options as ours."""
        row = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        max_tokens = row.pop("max_gen_toks")
        stop = [text for text in row.pop("until") if text]
        if row.get("num_beams") == 1:  # the default, which tasks may repeat
            del row["num_beams"]
        if not row.pop("do_sample"):
            row["temperature"] = 0
        if "repetition_penalty" in row:
            row["repeat_penalty"] = row.pop("repetition_penalty")
        room = self.max_length - max_tokens
        if room < 1:
            limit = f"must be less than the model's context of {self.max_length}"
            raise InputError(f"max_gen_toks is {max_tokens}, and {limit}")
        # The defaults of transformers.
        options = Options(temperature=1, top_k=50, top_p=1, max_tokens=max_tokens, stop=stop)
        ids = self.tok_encode(context) or [self.eot_token_id]
        options = self.engine.loaded.with_token_ids(options.with_row({"seed": seed} | row))
        return Request(Text(ids[-room:]), options, index)


def main() -> None:
    """Run `lm-eval` with one more model, `gpt-cli`."""
    try:
        cli_evaluate()
    except GPTCLIError as error:
        print(f"gpt-cli: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
