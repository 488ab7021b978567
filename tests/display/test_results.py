"""Results of an engine: their lines, their records, and tables of them."""

import pickle

import pytest

from gpt_cli.errors import InputError
from support.in_process import records_here

TEXT = "Once upon a time, there was a fox. \x1b[31m<b>"
ANSWERS = ("The moon was round and", " silver", " golden")


@pytest.fixture(scope="module")
def results(tiny):
    """Return results of all kinds, by the names of their methods."""
    prompt, *answers = ANSWERS
    (completion,) = tiny.generate([prompt], max_tokens=40, seed=1, beams=2)
    sets = ["Good", "Fine", "Great"], ["Bad", "Poor", "Sad"]
    hook = "ln_final.hook_normalized"
    return {
        "score": tiny.score(TEXT, words=True, ranks=True),
        "generate": completion,
        "batch": next(tiny.batch([{"prompt": prompt, "seed": 2, "max_tokens": 9}])),
        "rank": tiny.rank(prompt, answers)[0],
        "trace": tiny.trace(prompt),
        "tree": tiny.tree(prompt),
        "node": tiny.tree(prompt)[0],
        "attribution": tiny.attribution(prompt, *answers),
        "patch": tiny.patch(prompt, prompt.replace("moon", "fox"), *answers, what="z"),
        "ablate": tiny.ablate(prompt, *answers),
        "vector": tiny.vector(*sets, hook),
        "activations": next(tiny.activations([prompt], ["*.attn.hook_z", hook, "hook_embed"])),
        "activation_rows": next(tiny.activation_rows([prompt], [hook], None)),
        "weights": tiny.weights,
    }


def test_each_result_is_one_short_line(results):
    for name, result in results.items():
        line = repr(result)
        assert len(line) <= 110, name
        assert line.isprintable(), name
        assert line[0] + line[-1] == "<>"
    assert repr(results["score"]).endswith(": 'Once upon a time, there was a f…'>")
    assert repr(results["attribution"]).startswith("<Attribution: 4 layers x 4 heads, logit ' sil")
    assert "(11 arrays" not in repr(results["activations"])
    assert "hook_z (5, 4, 48), " in repr(results["activations"])


def test_a_result_has_the_record_of_its_command(results, tmp_path):
    prompt = ANSWERS[0]
    file = tmp_path / "text.txt"
    file.write_bytes(TEXT.encode())
    commands = {
        "score": ["score", "--words", file],
        "generate": ["generate", "-n", 40, "--seed", 1, "--beams", 2, prompt],
        "batch": ["generate", "-n", 9, "--seed", 2, prompt],
    }
    for name, (command, *arguments) in commands.items():
        record = results[name].to_dict()
        (told, *_) = records_here(command, "-m", "tiny", "--json", *map(str, arguments))
        record.pop("timing", None)
        assert told | record == told, name
    told = records_here("rank", "-m", "tiny", "--json", "--choices", "silver,golden", prompt)
    best = max(told, key=lambda choice: choice["probability"])
    assert results["rank"].to_dict().items() <= best.items()
    assert results["generate"].others[0].to_dict()["model"] == "tiny"
    assert [token["rank"] for token in results["score"].tokens] == results["score"].ranks
    assert "".join(token["token"] for token in results["rank"].tokens) == results["rank"].text
    assert results["generate"].tokens[0].keys() == {"id", "token", "bytes", "logprob", "top"}


def test_results_have_pictures(tiny, results):
    frames = {"trace": 2, "tree": 1, "attribution": 1, "patch": 1, "ablate": 1}
    for name, result in results.items():
        if name in ("score", "generate", "batch"):
            assert result._repr_html_().startswith("<div>")
        elif name != "weights" and name != "activations":
            html = result._repr_html_() or ""
            assert html.count("<iframe ") == frames.get(name, 0), name
    assert pickle.loads(pickle.dumps(results["tree"]))._repr_html_() is None
    assert "1 token (0 scored)" in tiny.score_many(["Once"])[0]._repr_html_()


def test_grids_have_the_records_of_show(results):
    prompt, answer, wrong = ANSWERS
    texts = [prompt, prompt.replace("moon", "fox")]
    for name in ("attribution", "patch", "ablate"):
        more = [*texts, "--what", "z"] if name == "patch" else [prompt]
        flags = ["-m", "tiny", "--json", "--answer", answer, "--wrong", wrong]
        assert records_here("show", name, *flags, *more) == [results[name].to_dict()]
    assert records_here("show", "tree", "-m", "tiny", "--json", prompt) == [
        results["tree"].to_dict()
    ]


def test_a_pickled_result_has_its_record_and_no_tokenizer(results):
    for name in ("score", "generate", "rank", "tree", "attribution"):
        data = pickle.dumps(results[name])
        assert len(data) < 4000, name
        copy = pickle.loads(data)
        assert repr(copy)[:9] == repr(results[name])[:9]
        if name in ("score", "generate", "rank"):
            assert copy == results[name]
            assert copy.to_dict() == results[name].to_dict()
            with pytest.raises(InputError, match="was pickled has no texts"):
                _ = copy.tokens


def test_results_become_data_frames(tiny, results):
    pandas = pytest.importorskip("pandas")
    scores = pandas.DataFrame([score.to_dict() for score in tiny.score_many([TEXT, "A fox."])])
    assert scores["tokens"].tolist() == [len(results["score"].ids), 3]
    tokens = pandas.DataFrame(results["score"].tokens)
    assert tokens["logprob"].isna().tolist() == [True] + [False] * (len(tokens) - 1)
    words = pandas.DataFrame(results["score"].words)
    assert words["text"].tolist() == TEXT.split()
    assert pandas.DataFrame(tiny.rank(*ANSWERS[:1], ANSWERS[1:]))["probability"].sum() == 1
