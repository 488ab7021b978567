"""The tasks of `batch` and `score`: records of rows."""

from dataclasses import asdict, replace
from functools import partial

import pytest

from gpt_cli import records
from gpt_cli.errors import InputError
from gpt_cli.generation.generate import read_ahead
from gpt_cli.jobs import (
    Activations,
    Filtering,
    Generation,
    InputRow,
    Ranking,
    Scoring,
    Template,
)
from gpt_cli.options.declare import OptionError, OptionTypeError
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from support.scores import same

OPTIONS = Options(max_tokens=2, seed=1, temperature=1.5, ignore_eos=True)
ERROR = {"error": {"code": "invalid_input", "message": "m"}}


def records_of(engine, task, rows):
    """Return the records of rows; each has one."""
    return [record for (record,) in task.records(engine, rows)]


def row(index, id=None, file=None, **fields):
    """Return a row with fields, or one with an error."""
    error = None if fields else InputError("m")
    return InputRow(index, index + 1, file, id, fields, error)


@pytest.mark.parametrize("logprobs", [False, True])
def test_prompts_are_continued(engine, logprobs):
    rows = [
        row(5, 5, "f", prompt="He"),
        row(6, "x", "f"),
        row(7, 7, "f", prompt="it", max_tokens=1),
        row(8, 8, "f", prompt="He", seed=2),
    ]
    good = [rows[0], *rows[2:]]
    task = Generation(OPTIONS, batch_size=1, logprobs=logprobs, keep_fields="id")
    first, failed, *rest = records_of(engine, task, rows)
    assert failed == {"index": 6, "id": "x", "file": "f", "line": 7} | ERROR
    done = engine.batch([input.fields for input in good], OPTIONS, indices=[5, 7, 8])
    for record, input, completion in zip([first, *rest], good, done, strict=True):
        identity = {"index": input.index, "id": input.id, "file": "f", "line": input.line}
        expected = identity | {"prompt": input.fields["prompt"]}
        expected |= records.of_completion(engine, completion, logprobs=logprobs)
        assert untimed(record) == same(engine.model, untimed(expected))
        assert task.tokens(record) == len(completion.ids)
        sometimes = records.HYPOTHESIS | records.SAMPLE
        schema = [name for name in task.schema if name not in sometimes]
        assert [*record] == [*records.IDENTITY, *task.layout.origin, "prompt", *schema]
        assert {*record, *records.ERROR, *sometimes} == {*task.layout.table}


def untimed(record):
    return record | {"timing": None}


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("words", "layers"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("logprobs", "min_k"), [(False, None), (True, None), (False, 20.0)])
def test_texts_are_scored(engine, logprobs, min_k, words, layers, bos):
    task = Scoring(8, logprobs, words, bos, layers=layers, min_k=min_k)
    good, bad = records_of(engine, task, [row(0, text="He said"), row(1, 0)])
    details = dict.fromkeys(["ranks", "entropies", "gaps"], logprobs)
    details["entropies"] |= min_k is not None
    score = engine.score("He said", **details, words=words, bos=bos, layers=layers)
    assert good == {"index": 0, "text": "He said"} | records.of_score(
        engine, score, logprobs=logprobs, min_k=min_k
    )
    assert bad == {"index": 1, "id": 0, "line": 2} | ERROR
    assert task.tokens(good) == len(score.ids) - (not bos)
    assert set(good) == {"index", "text", *task.schema}
    assert ("logprobs" in good) is ("logprobs" in task.schema) is logprobs
    assert ("words" in good) is ("words" in task.schema) is words
    for name, columns in (("logprobs", records.SCORED_TOKEN), ("words", records.WORD)):
        columns = columns | (records.LAYERS if layers else {})
        assert all([*item] == [*columns] for item in good.get(name, []))


@pytest.mark.parametrize("begins", [False, True])
def test_a_file_without_scored_tokens_is_an_error_with_its_name(engine, monkeypatch, begins):
    start = [engine.model.config.bos_token_id] if begins else []
    monkeypatch.setattr(LoadedModel, "start", start)
    needed = "1 token" if begins else "2 tokens: the first has nothing before it"
    whole = replace(row(0, file="a.txt", text=""), line=None)
    (error,) = Scoring(whole_files=True).results(engine, [whole])
    assert str(error) == f"a.txt: a text needs at least {needed}"


@pytest.mark.parametrize("pool", [None, "last", "mean", "word"])
def test_values_are_arrays_with_what_their_rows_are_of(engine, pool):
    task = Activations(("hook_embed", "hook_pos_embed"), pool, out_dtype="float16")
    good, bad = records_of(engine, task, [row(0, text="He said", label=7), row(1, 0)])
    arrays = good.pop("arrays")
    ids = engine.encode("He said")
    assert good == {"index": 0, "line": 1, "tokens": len(ids), "text": "He said", "label": 7}
    assert bad == {"index": 1, "id": 0, "line": 2} | ERROR
    assert task.tokens(good) == len(ids)
    (values,) = engine.activations(["He said"], task.hooks, pool=pool)
    names = {None: ["position", "token"], "word": ["word", "start", "end"]}.get(pool, [])
    assert [*arrays] == [*names, *task.hooks]
    for name in task.hooks:
        expected = values[name] if pool in (None, "word") else values[name][None]
        assert (arrays[name] == expected.astype("float16")).all()
    assert task.settings == {
        "hook": task.hooks, "pool": pool, "bos": False, "template": None, "out_dtype": "float16",
        "keep_fields": "all",
    }  # fmt: skip


def test_prompts_are_ranked_by_a_template(engine):
    task = Ranking(("he", "it "), template=Template("{a} {b}"))
    rows = [
        row(0, a="He", b="said"),
        row(1, "x"),
        row(2, a="it", b="", choices=["me"]),
        row(3, a="it", b="", choices=["me", 2]),
    ]
    assert task.layout.columns == ("a", "b", "choices", "edits", "special")
    good, bad, other, wrong = records_of(engine, task, rows)
    ranked = engine.rank("He said", [" he", " it"])
    assert (good["a"], good["b"]) == ("He", "said")
    expected = [(item.text, item.logprob) for item in ranked]
    assert [(c["text"], c["logprob"]) for c in good["choices"]] == same(engine.model, expected)
    assert [c["choice"] for c in good["choices"]] == [item.text.strip() for item in ranked]
    assert set(good["choices"][0]) == set(task.schema["choices"][0])
    assert bad == {"index": 1, "id": "x", "line": 2} | ERROR
    assert (other["choices"][0]["text"], other["choices"][0]["probability"]) == ("me", 1)
    assert "must be a list" in wrong["error"]["message"]
    assert task.tokens(good) == sum(len(item.ids) for item in ranked)
    assert task.settings == {
        "choices": ("he", "it "), "by": "total", "exact": False, "template": {"text": "{a} {b}"},
        "keep_fields": "all",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("task", "name", "what"),
    [
        (Ranking, "choices", "the name of an option"),
        (partial(Generation, OPTIONS), "seed", "the name of an option"),
        (partial(Generation, OPTIONS), "text", "a field of each record"),
        *((Ranking, name, "a field of each record") for name in ["id", "index", "file", "error"]),
    ],
)
def test_a_template_may_not_have_the_names_of_other_fields(task, name, what):
    with pytest.raises(InputError, match=f"{{{name}}} is {what}"):
        _ = task(template=Template(f"{{line}} {{{name}}}")).layout.columns


def test_an_error_has_the_number_of_its_line_beside_a_field_line(engine):
    task = Ranking(("he",), template=Template("{line}"))
    bad, good = records_of(engine, task, [row(0, file="f"), row(1, line="He")])
    assert bad == {"index": 0, "file": "f", "line_number": 1} | ERROR
    assert good["line"] == "He"


def test_a_template_is_continued_in_place_of_a_prompt(engine):
    task = Generation(OPTIONS, template=Template("He {a}"))
    (record,) = records_of(engine, task, [row(0, a="said", prompt="it", max_tokens=1)])
    (expected,) = engine.batch([{"prompt": "He said", "max_tokens": 1}], OPTIONS)
    assert (record["a"], record["text"]) == ("said", expected.text)


def test_options_and_choices_of_a_wrong_type_are_refused():
    with pytest.raises(OptionTypeError, match="options must be Options, not"):
        Generation({"max_tokens": 3})
    with pytest.raises(OptionTypeError, match="choices must be a list, not 'a,b'"):
        Ranking("a,b")


def test_hooks_are_a_list_with_at_least_one(engine):
    with pytest.raises(OptionTypeError, match="hooks must be a list, not 'hook_embed'"):
        Activations("hook_embed")
    with pytest.raises(InputError, match="give at least one hook point"):
        records_of(engine, Activations(()), [row(0, text="He said")])


def test_a_row_without_a_prompt_is_not_ranked(engine):
    missing, good = records_of(engine, Ranking(("me",)), [row(0, prompt=None), row(1, prompt="it")])
    assert missing["error"]["message"] == 'a row needs a string "prompt"'
    assert good["choices"][0]["text"] == " me"


@pytest.mark.parametrize("choices", [[], "a", ["a", "a"], ["a", 2]])
def test_a_row_whose_choices_are_none_is_not_continued_without_them(engine, choices):
    (record,) = records_of(engine, Generation(OPTIONS), [row(0, prompt="He", choices=choices)])
    assert "choice" in record["error"]["message"]


def test_a_stride_is_that_of_score(engine):
    text = "He said " * 40
    (record,) = records_of(engine, Scoring(stride=3), [row(0, text=text)])
    assert record["total_logprob"] == engine.score(text, stride=3).total_logprob
    assert record["total_logprob"] != engine.score(text).total_logprob


def test_settings_have_all_options():
    task = Generation(OPTIONS, logprobs=True)
    chosen = asdict(OPTIONS) | {"logprobs": True, "template": None, "keep_fields": "all"}
    names = ("special", "min_tokens", "bad_words", "stop_token_ids")
    later = {name: chosen.pop(name) for name in names}
    assert task.settings == chosen
    assert not any(later.values())
    assert Generation(Options(min_tokens=3)).settings["min_tokens"] == 3
    assert Generation(replace(OPTIONS, stop_token_ids=[1])).settings["stop_token_ids"] == (1,)
    settings = {"stride": 3, "logprobs": False, "words": False, "bos": False, "template": None}
    settings |= {"layers": False, "min_k": None, "keep_fields": "all"}
    assert Scoring(stride=3).settings == settings
    assert Scoring() == Scoring(None, False, False, False)
    assert Generation(OPTIONS) == Generation(OPTIONS, None, False)
    template = Generation(OPTIONS, template=Template("{a}")).settings["template"]
    assert template == asdict(Template("{a}")) and "{a}" in template.values()
    assert "samples" not in task.settings
    assert Generation(OPTIONS, samples=2).settings["samples"] == 2
    assert Generation.fields == ("prompt", "n", *Options.row_fields())
    assert Scoring.fields == ("text", "edits", "special", "context", "prompt", "words")


def test_a_row_without_choices_or_beams_has_those_of_the_options():
    prepared = Generation(Options(choices=("a", "b"))).prepare(row(0, prompt="x"))
    assert prepared.fields["choices"] == [" a", " b"]
    with pytest.raises(OptionError, match="samples must be at most beams, which is 2"):
        Generation(Options(beams=2), samples=3).prepare(row(0, prompt="x"))


def test_a_filter_passes_rows_at_its_bounds(engine):
    rows = [replace(row(0, text="He said"), data=b"He said\n")]
    ((record,),) = Scoring().records(engine, rows)
    bound = record["perplexity"]
    for bounds, passes in [((bound, bound), True), ((bound * 1.001, None), False)]:
        task = Filtering(min_perplexity=bounds[0], max_perplexity=bounds[1])
        ((record,),) = task.records(engine, rows)
        assert ("data" in record) == passes
    assert task.every_line


def test_a_seed_is_given_to_the_options():
    task = Generation(Options(top_k=3), 5, True)
    assert task.with_seed(7) == Generation(Options(top_k=3, seed=7), 5, True)
    assert Generation(OPTIONS).with_seed(7) == Generation(OPTIONS)


def test_rows_are_given_together():
    assert Scoring().rows_together == 256
    assert Generation(OPTIONS, 1).rows_together == max(256, read_ahead(1))
    assert Generation(OPTIONS, 10**6).rows_together == read_ahead(10**6) > 256


# --- samples -------------------------------------------------------------------------------------


def texts_of(task, rows, engine):
    return [[record["text"] for record in of_row] for of_row in task.records(engine, rows)]


def test_a_row_has_samples(engine):
    task = Generation(OPTIONS, samples=2)
    rows = [row(0, prompt="He"), row(1, 0), row(2, 5, prompt="it", n=3), row(3, prompt="it", n=1)]
    two, (failed,), three, one = task.records(engine, rows)
    assert failed == {"index": 1, "id": 0, "line": 2} | ERROR
    for of_row, index, prompt in ((two, 0, "He"), (three, 2, "it"), (one, 3, "it")):
        for sample, record in enumerate(of_row):
            assert (record["index"], record["prompt"]) == (index, prompt)
            assert (record["sample"], record["samples"]) == (sample, len(of_row))
        assert task.tokens(of_row[0]) == 2
    assert [len(two), len(three), len(one)] == [2, 3, 1]
    (alone,) = Generation(OPTIONS).records(engine, rows[:1])
    assert "sample" not in alone[0]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_a_sample_depends_on_its_row_and_its_number_alone(engine, batch_size):
    options = Options(max_tokens=6, seed=1, temperature=1.5, top_k=0, top_p=1)
    rows = [row(index, prompt="He said") for index in range(4)]
    plain = texts_of(Generation(options), rows, engine)
    three = texts_of(Generation(options, batch_size, samples=3), rows, engine)
    assert [texts[:1] for texts in three] == plain
    assert len({text for texts in three for text in texts}) == 12
    five = texts_of(Generation(options, batch_size, samples=5), rows[2:], engine)
    assert [texts[:3] for texts in five] == three[2:]


def test_the_samples_of_a_row_with_a_seed_are_those_of_generate(engine):
    options = Options(max_tokens=6, seed=1, temperature=1.5, top_k=0, top_p=1)
    rows = [row(7, prompt="He said", seed=5, n=4)]
    texts = texts_of(Generation(options), rows, engine)
    alone = engine.run(["He said"] * 4, replace(options, seed=5))
    assert list(alone)
    assert texts == [[completion.text for completion in alone.completions]]


def test_the_samples_of_a_search_are_its_best_texts(engine):
    options = Options(max_tokens=6, beams=4, temperature=0)
    rows = [row(0, prompt="He said", n=3), row(1, prompt="He said", beams=2)]
    three, two = Generation(options, samples=2).records(engine, rows)
    (best,) = engine.generate(["He said"], beams=4, max_tokens=6, temperature=0)
    expected = [completion.text for completion in (best, *best.others)]
    assert [record["text"] for record in three] == expected[:3]
    assert [record["score"] for record in three] == sorted(
        (record["score"] for record in three), reverse=True
    )
    assert [record["samples"] for record in two] == [2, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be from 1 to 10000"),
        ({"n": "2"}, 'n must be a whole number, not "2"'),
        ({"n": 3, "beams": 2}, "n must be at most beams, which is 2"),
        ({"beams": 1}, "samples must be at most beams, which is 1"),
        ({"n": 2, "beams": "x"}, 'beams must be a whole number, not "x"'),
        ({"n": 2, "top_k": -1}, "top_k must be 0 or more"),
    ],
)
def test_a_row_that_cannot_have_samples_has_one_error(engine, fields, message):
    rows = [row(0, prompt="He"), row(1, prompt="it", **fields), row(2, prompt="it")]
    good, bad, last = Generation(OPTIONS, samples=2).records(engine, rows)
    assert [record["error"]["message"] for record in bad] == [message]
    assert len(good) == len(last) == 2


def test_a_number_of_samples_is_checked():
    with pytest.raises(OptionError, match="samples must be from 1 to 10000"):
        Generation(OPTIONS, samples=0)
