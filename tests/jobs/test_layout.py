"""Templates of rows."""

import pickle
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.errors import InputError
from gpt_cli.jobs import Template

texts = st.text(st.sampled_from("ab {}\n€"), max_size=12)
names = st.text(st.sampled_from(string.ascii_letters + " .:!0€-"), min_size=1, max_size=5)


@given(parts=st.lists(st.tuples(texts, names), min_size=1, max_size=4), end=texts, value=texts)
def test_fields_are_filled_in_and_doubled_braces_are_braces(parts, end, value):
    def doubled(text):
        return text.replace("{", "{{").replace("}", "}}")

    template = Template(
        "".join(f"{doubled(text)}{{{name}}}" for text, name in parts) + doubled(end)
    )
    fields = {name: f"{value}{index}" for index, (_, name) in enumerate(parts)}
    assert template.names == tuple(dict.fromkeys(name for _, name in parts))
    assert template.fill(fields) == "".join(text + fields[name] for text, name in parts) + end
    assert pickle.loads(pickle.dumps(template)) == template  # for other machines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a lone { at character 1"),
        ("ab}{x}", "a lone } at character 3"),
        ("{x}{{{", "a lone { at character 6"),
        ("{x}}}}", "a lone } at character 6"),
        ("{a{b}}", "a lone { at character 1"),
        ("{}", "a lone { at character 1"),
        ("", "has no field"),
        ("{{x}}", "has no field"),
    ],
)
def test_what_is_no_template_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        Template(text)
