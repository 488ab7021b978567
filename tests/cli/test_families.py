"""Commands with each kind of tokenizer: see tests/golden/tokenizers."""

import functools
import json
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli.errors import InputError
from support.families import FAMILIES, REFERENCE, write_family
from support.in_process import records_here, refusal, run_here
from support.processes import posix
from support.server_process import COMPLETIONS, serving

pytest.importorskip("tokenizers")

PROMPT = "Once upon a time"
WITHOUT_BYTES = ("uer",)
WITH_ALL_BYTES = ("german", "prefixed", "published", "digits", "fallback", "gpt_sw3", "words")
# For commands, these are like others: tests/folder has all of them.
ALIKE = (
    *("no_alphabet_files", "doubled", "doubled_files", "dna", "words_decoder", "words_json"),
    *("strips", "strips_decoder", "prefixed_words"),
)
BEGUN = ("prefixed", "fallback")  # texts after their start token


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return functools.cache(lambda family: write_family(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def engine_of(folder_of):
    return functools.cache(lambda family: gpt_cli.load(str(folder_of(family))))


@pytest.fixture(params=[name for name in FAMILIES if name not in ALIKE])
def family(request) -> str:
    return request.param


@pytest.fixture
def folder(family, folder_of) -> Path:
    return folder_of(family)


@pytest.fixture
def engine(family, engine_of):
    return engine_of(family)


def changed(folder: Path, to: Path, **settings) -> Path:
    """Copy a model with links, and change its tokenizer_config.json."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).symlink_to(path)
    (to / "tokenizer_config.json").unlink()
    (to / "tokenizer_config.json").write_text(json.dumps(settings))
    return to


# --- ids and texts -------------------------------------------------------------------------------


def test_a_text_is_what_its_ids_add_to_the_decoded_prompt(family, folder, engine):
    ids = engine.encode(PROMPT)
    assert ids[len(REFERENCE[family]["start"]) :] == REFERENCE[family]["ids"][1]
    options = {"max_tokens": 20, "seed": 1, "ignore_eos": True}
    (done,) = engine.generate([PROMPT], **options)
    assert engine.decode(ids + done.ids) == engine.decode(ids) + done.text
    assert "".join(engine.stream(PROMPT, **options)) == done.text
    flags = ["-m", folder, "-n", 20, "-s", 1, "--ignore-eos", "-q"]
    assert run_here("generate", *flags, "--echo", PROMPT)[0].decode() == PROMPT + done.text
    (row,) = records_here("batch", *flags, input=PROMPT.encode())
    assert row["text"] == done.text
    stop = done.text[5:8]
    (cut,) = engine.generate([PROMPT], **options, stop=[stop])
    assert (cut.text, cut.finish_reason) == (done.text.partition(stop)[0], "stop")


def test_tokens_are_shown_as_text_or_by_their_names(family, folder, engine):
    ids, text = engine.encode("the fox"), "the fox"
    rows = records_here("tokenize", "-m", folder, "--json", text)
    assert [row["id"] for row in rows] == ids
    assert all(bool(row["bytes"]) == (family not in WITHOUT_BYTES) for row in rows)
    assert rows[0]["start"] == 0
    assert rows[-1]["end"] == len(engine.decode(ids))
    written, _ = run_here("detokenize", "-m", folder, *ids)
    assert written.decode() == engine.decode(ids)
    (row,) = records_here("next", "-m", folder, "--top", 1, "--json", text)
    data = engine.tokenizer.token_bytes(row["id"])
    name = engine.tokenizer.token_name(row["id"]) if data is None else data.decode(errors="replace")
    assert (row["token"], bytes(row["bytes"])) == (name, data or b"")
    scored, _ = run_here("score", "--tokens", "-m", folder, input=text.encode())
    shown = [line.split("\t")[-1] for line in scored.decode().splitlines()]
    names = [engine.tokenizer.token_name(id) for id in ids[len(engine.loaded.start) :]]
    assert all(name in cell for name, cell in zip(names, shown, strict=True))
    for view in ("surprise", "lens", "tree"):
        shown = run_here("show", view, "-m", folder, text)[0].decode()
        assert engine.tokenizer.token_name(ids[-1]) in shown


def test_texts_are_measured_in_their_bytes(family, engine):
    text = "the fox was cold"
    scored = engine.score(text)
    first = 0 if family in BEGUN else len(next(engine.tokenizer.pieces(scored.ids)))
    assert scored.bytes_scored == len(text) - first
    lossy = "THE  fox \u2603\u4e00 ran"  # some have unknown, changed and lost characters
    if family != "uer":  # which has no start token
        for whole in (text, lossy):
            assert engine.score(whole, bos=True).bytes_scored == len(whole.encode())
    assert 0 < engine.score(lossy).bytes_scored <= len(lossy.encode())
    ranked = engine.rank("the", [" fox", " river"], by="byte")
    assert {choice.text: choice.bytes for choice in ranked} == {" fox": 4, " river": 6}


def test_choices_that_a_tokenizer_cannot_tell_apart_are_refused(engine_of):
    with pytest.raises(InputError, match=r"'\u2603' and '\u2604' have the same tokens"):
        engine_of("uer").rank("the", ["fox", "\u2603", "\u2604"])


@posix
@pytest.mark.parametrize("family", ["goldfish", "uer", "fallback"])
def test_the_server_has_the_same_texts_and_offsets(family, engine, folder):
    body = {"prompt": PROMPT, "seed": 1, "max_tokens": 12, "logprobs": 1}
    (done,) = engine.generate([PROMPT], seed=1, max_tokens=12, temperature=1, top_k=0, top_p=1)
    with serving(model=folder) as server:
        (plain,) = server.ask(COMPLETIONS, body).json()["choices"]
        (echoed,) = server.ask(COMPLETIONS, body | {"echo": True}).json()["choices"]
        about = server.ask("/tokenizer_info").json()
        if family in WITHOUT_BYTES:
            answer = server.ask(COMPLETIONS, body | {"structured_outputs": {"regex": "a+"}})
            assert (answer.status, answer.json()["error"]["param"]) == (
                400,
                "structured_outputs.regex",
            )
    assert plain["text"] == done.text
    assert echoed["text"] == PROMPT + done.text
    for choice in (plain, echoed):
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[0] == (family == "uer" and choice is plain)  # after a space
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(choice["text"])
    names = {"goldfish": ("[CLS]", "[SEP]"), "uer": (None, None), "fallback": ("<s>", "</s>")}
    assert (about["bos_token"], about["eos_token"]) == names[family]
    if family == "fallback":  # the start token has no text
        assert echoed["logprobs"]["text_offset"][:2] == [0, 0]
        assert echoed["logprobs"]["text_offset"][-12:] == [
            len(PROMPT) + offset for offset in plain["logprobs"]["text_offset"]
        ]


@pytest.mark.parametrize("family", ["uer", "rinna", "xlm", "digits"])
def test_a_copy_in_int8_has_the_tokenizer(family, folder, tmp_path):
    run_here("quantize", folder, "-o", tmp_path / "copy")
    for command in (["tokenize", "--special", "the fox 1984 <s>"], ["detokenize", "7", "9"]):
        assert run_here(*command, "-m", tmp_path / "copy") == run_here(*command, "-m", folder)


# --- bytes ---------------------------------------------------------------------------------------


def test_what_needs_bytes_works_where_tokens_have_them(family, folder, engine, tmp_path):
    pytest.importorskip("llguidance")
    text = "the fox was small"
    if family in WITHOUT_BYTES:
        error = refusal("generate", "--regex", "a", "-m", folder, "the")
        assert "a constraint needs the bytes of each token" in error
        with pytest.raises(InputError, match=r"surprisal of words needs the bytes.*--tokens"):
            engine.score(text, words=True)
        return
    for seed in range(3):
        (done,) = engine.generate(["the"], regex=r" (near|river)\.", seed=seed, max_tokens=12)
        assert done.text in (" near.", " river.")
    scored = engine.score(text, words=True, bos=True)
    assert [word.text for word in scored.words] == text.split()
    start = family == "prefixed"
    assert [word.start for word in scored.words][1:] == [4 + start, 8 + start, 12 + start]


def test_a_choice_that_no_tokens_write_is_refused(folder_of):
    pytest.importorskip("llguidance")
    command = ["generate", "-q", "-m", folder_of("goldfish"), "--choices"]
    error = refusal(*command, " fox, \u2603 fox", "the")
    assert "--choices has ' \u2603 fox', which no tokens write" in error
    assert run_here(*command, "fox,river", "the")[0] in (b" fox", b" river")


def test_compression_needs_tokens_for_all_bytes(family, folder, engine, library, tmp_path):
    data = "the fox\n Straße\xa0läuft  \n".encode() + b"\xff\x00 the river"
    if family not in WITH_ALL_BYTES:
        error = refusal("compress", "-m", folder, input=data)
        assert "compression needs tokens for all bytes" in error
        return
    assert engine.decompress(engine.compress(data)) == data


# --- special tokens ------------------------------------------------------------------------------


def test_the_start_token_is_that_of_transformers(family, engine):
    config, expected = engine.model.config, REFERENCE[family]
    if expected["bos"] is not None:
        assert config.bos_token_id == expected["bos"]
    assert engine.loaded.start == expected["start"]
    if family != "uer":
        assert engine.loaded.prompt_ids("") == [config.bos_token_id]
    else:  # config.json names tokens outside the vocabulary
        assert (config.bos_token_id, config.eos_token_id) == (None, ())


def test_the_folder_names_special_tokens_that_config_json_has_wrong(folder_of, engine_of, tmp_path):
    config = engine_of("german").model.config
    assert (config.bos_token_id, config.eos_token_id) == (0, (0,))
    bare = changed(folder_of("german"), tmp_path / "bare")  # names none
    (bare / "special_tokens_map.json").unlink()
    config = gpt_cli.load(str(bare)).model.config
    assert (config.bos_token_id, config.eos_token_id) == (0, (300,))
    other = changed(folder_of("german"), tmp_path / "other", eos_token="no such token")
    assert gpt_cli.load(str(other)).model.config.eos_token_id == (300,)


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        ({"eos_token_id": [5, 300]}, (5, 300)),
        ({"eos_token_id": 300, "_from_model_config": True}, (0,)),
        ({}, (0,)),
    ],
)
def test_generation_config_wins_unless_it_repeats_config_json(
    folder_of, tmp_path, generation, ends
):
    folder = changed(folder_of("german"), tmp_path / "model", eos_token="<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert gpt_cli.load(str(folder)).model.config.eos_token_id == ends


def test_an_empty_prompt_without_a_start_token_says_how_to_give_one(folder_of):
    given = "must be given: the prompt is empty, and this model has no start token"
    assert f"--bos-token {given}" in refusal("generate", "-m", folder_of("uer"), "")
    with pytest.raises(InputError, match=f"^bos_token {given}"):
        next(gpt_cli.load(str(folder_of("uer"))).stream(""))


@pytest.mark.parametrize("token", ["[CLS]", 2, "2"])
def test_a_start_token_may_be_given(folder_of, token):
    engine = gpt_cli.load(str(folder_of("uer")), bos_token=token)
    assert engine.loaded.prompt_ids("") == [2]
    (done,) = engine.generate([""], max_tokens=5, seed=1)
    flags = ["-m", folder_of("uer"), "--bos-token", token, "-q"]
    assert run_here("generate", *flags, "-n", 5, "-s", 1, "")[0].decode() == done.text
    assert run_here("score", *flags, "--bos", "--json", input=b"the")[0]


@pytest.mark.parametrize("token", ["<none>", "", "1000000", "the fox"])
def test_a_start_token_must_be_one_of_the_model(folder_of, token):
    error = refusal("generate", "-m", folder_of("uer"), "--bos-token", token, "a")
    assert f"--bos-token {token!r} is not a token of this model: give" in error


def test_the_start_token_of_every_text_may_be_replaced(folder_of):
    folder = str(folder_of("fallback"))
    engine = gpt_cli.load(folder, bos_token="</s>")
    assert engine.encode("the")[0] == 2
    assert engine.score("the", bos=True) == engine.score("the")
