"""Values of each sampling option, for tests of what must hold for all of them."""

from dataclasses import fields

from hypothesis import strategies as st

from gpt_cli.options.request import SamplingParams

VALUES = {
    "temperature": [0, 0.7, 1.5],
    "top_k": [0, 4, 40],
    "top_p": [0.8, 1.0],
    "min_p": [0.0, 0.01],
    "typical_p": [0.7, 1.0],
    "repeat_penalty": [1.0, 1.3],
    "presence_penalty": [0.0, 0.5],
    "frequency_penalty": [0.0, -0.5, 2.0],
    "no_repeat_ngram": [0, 2],
    "logit_bias": [(), ((3, -100.0), (5, 2.5))],
}
names = {option.name for option in fields(SamplingParams)}
assert set(VALUES) == names, "each sampling option needs some values here"

sampling_options = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in VALUES.items()}
)
