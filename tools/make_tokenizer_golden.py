"""Make tests/golden/tokenizers: small tokenizers in the shapes of published GPT-2s, and their ids.

A folder has the tokenizer's files of a family. tokenizers.json has what transformers makes of them:
the ids of texts, the texts of ids, and the start and end tokens. It needs transformers and
sentencepiece, which the tests do not:

    .venv-golden/bin/pip install -e ".[train]" sentencepiece protobuf
    .venv-golden/bin/python tools/make_tokenizer_golden.py

Nothing is downloaded. Run it again only if its cases change.
"""
# ruff: noqa: S106 (tokens are no passwords)

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
FOLDERS = GOLDEN / "tokenizers"

SENTENCES = [
    "Once upon a time there was a small fox who lived near the river.",
    'The fox said: "I\'m cold, and the night is long!" In 1984, 27 foxes came.',
    "Der Fuchs läuft über die Brücke, und die Straße ist naß.",
    "昔々、小さな狐が川の近くに住んでいました。",
    "从前有一只小狐狸住在河边。",
    "옛날 옛적에 작은 여우가 강가에 살았습니다.",
    "A long time ago the river was cold and the small fox lived there.",
]
TEXTS = [
    "",
    "Once upon a time",
    ' the fox  said:\n"I\'m cold"\n\n',
    "The night of 1984 was long, and 27 foxes came!",
    "Der Fuchs läuft über die Straße",
    "昔々、小さな狐が",
    "从前有一只小狐狸 住在河边。",
    "옛날 옛적에 작은 여우가",
    "unknown: 😀 Ω \u0301 ﬁ \u212b\u00a0x\u3000y\u200bz\tq",
    "  two  spaces and an end ",
    "[CLS] <s> <|endoftext|> </s> <unk>, <pad><mask> are names",
    "▁ is a character, too; so is \ufffd.",
    "isn't it , he said .",
    "I had COVID-19 in spring, not xCOVID-19y; ENDs have an END and the\u00a0END.",
    "x <sep> y<sep>\n\nz <word> and<word>s <sep>2 \t<mask>\t<usr> <mask>",
    "ACGTNACCGT ACGTTTAC",
]
# Runs of byte tokens, most of them not UTF-8.
BYTES = [
    b"\xe4h",
    b"\xe4\xb8\xad",
    b"\xf0\x9f\x98",
    b"\xf0\x9f\x98\n",
    b"\xc0\x80",
    b" a\xff",
    b"\xed\xa0\x80",
]
END = "<|endoftext|>"
ENDS = "(END) [END] (END) \nEND\nEND\nEND"


def pieces(folder: Path, name: str, **options: Any) -> None:
    """Train a SentencePiece file on SENTENCES."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_prefix=str(folder / "trained"),
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    (folder / "trained.model").rename(folder / name)
    (folder / "trained.vocab").unlink()


def charsmap(folder: Path) -> str:
    """Write rules that normalize a few characters, in place of 240 kB for all of Unicode."""
    path = folder / "rules.tsv"
    pairs = {"ﬁ": "fi", "\u00a0": " ", "\u3000": " ", "\t": " ", "\n": " ", "\u212b": "\u00c5"}
    path.write_text(
        "".join(
            f"{' '.join(f'{ord(c):X}' for c in a)}\t{' '.join(f'{ord(c):X}' for c in b)}\n"
            for a, b in pairs.items()
        )
    )
    return str(path)


def write(folder: Path, name: str, value: Any) -> None:
    """Write a JSON file."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    (folder / name).write_text(text + "\n", encoding="utf-8")


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    """Return a trained tokenizer with a normalizer, a split and a decoder."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def byte_level(vocab_size: int = 320, special: tuple[str, ...] = (END,)) -> Tokenizer:
    """Return a tokenizer of GPT-2's own kind."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return trained(
        models.BPE(),
        trainer,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )


def save_byte_level(folder: Path, tokenizer: Tokenizer) -> None:
    """Write vocab.json and merges.txt."""
    raw = json.loads(tokenizer.to_str())["model"]
    write(folder, "vocab.json", raw["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in raw["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")


def goldfish(folder: Path) -> None:
    """SentencePiece's Unigram in a tokenizer.json; the start token is [CLS]."""
    special = ["[PAD]", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    replace = [normalizers.Replace(*pair) for pair in (("``", '"'), ("''", '"'))]
    space = "▁"
    tokenizer = trained(
        models.Unigram(),
        trainer,
        normalizer=normalizers.Sequence(replace),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(space)]
        ),
        decoder=decoders.Metaspace(space),
    )
    raw = json.loads(tokenizer.to_str())
    parts = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    ids = {
        name: {"id": name, "ids": [special.index(name)], "tokens": [name]}
        for name in ("[CLS]", "[SEP]")
    }
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": ids,
    }
    write(folder, "tokenizer.json", raw)
    config = {"tokenizer_class": "AlbertTokenizer", "do_lower_case": False, "keep_accents": True}
    config |= {
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "<unk>",
    }
    write(
        folder,
        "tokenizer_config.json",
        config | {"sep_token": "[SEP]", "cls_token": "[CLS]", "mask_token": "[MASK]"},
    )
    write(
        folder, "config.json", {"model_type": "gpt2", "bos_token_id": 50256, "eos_token_id": 50256}
    )


def uer(folder: Path) -> None:
    """BERT's vocab.txt; only config.json names the kind."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=200,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
    )
    tokenizer = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in vocab), encoding="utf-8")
    write(folder, "config.json", {"model_type": "gpt2", "tokenizer_class": "BertTokenizer"})
    write(folder, "special_tokens_map.json", {"unk_token": "[UNK]", "sep_token": "[SEP]"})


def rinna(folder: Path) -> None:
    """A SentencePiece file for T5's tokenizer."""
    pieces(
        folder,
        "spiece.model",
        vocab_size=150,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        control_symbols=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        normalization_rule_tsv=charsmap(folder),
    )
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "additional_special_tokens": []}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "[PAD]"}
    tokens |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    write(folder, "tokenizer_config.json", config | tokens)
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 2})


def kogpt2(folder: Path) -> None:
    """A BPE with U+2581 for spaces; no file but its page names PreTrainedTokenizerFast."""
    special = ["<s>", "</s>", "<usr>", "<pad>", "<sys>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer = trained(
        models.BPE(unk_token="<unk>"),
        trainer,
        normalizer=normalizers.NFKC(),
        pre_tokenizer=pre_tokenizers.Metaspace("▁"),
        decoder=decoders.Metaspace("▁"),
    )
    write(folder, "tokenizer.json", json.loads(tokenizer.to_str()))
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 1})


def german(folder: Path) -> None:
    """GPT-2's own kind, whose start token is not that of config.json, an ordinary word."""
    save_byte_level(folder, byte_level(special=(END,)))
    tokens = {"bos_token": END, "eos_token": END, "unk_token": END}
    write(folder, "tokenizer_config.json", tokens | {"add_prefix_space": False})
    write(folder, "special_tokens_map.json", {"bos_token": {"content": END, "lstrip": False}})
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 300, "eos_token_id": 300})


def prefixed(folder: Path) -> None:
    """GPT-2's own kind with a space and a start token before every text."""
    save_byte_level(folder, byte_level())
    write(folder, "tokenizer_config.json", {"add_prefix_space": True, "add_bos_token": True})
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0})


def published(folder: Path) -> None:
    """The tokenizer.json of gpt2, which has no model.type and ignores add_bos_token."""
    raw = json.loads(byte_level().to_str())
    del raw["model"]["type"]
    raw["model"]["merges"] = [" ".join(merge) for merge in raw["model"]["merges"]]
    raw["pre_tokenizer"]["add_prefix_space"] = True  # which GPT2Tokenizer ignores
    write(folder, "tokenizer.json", raw)
    write(folder, "tokenizer_config.json", {"add_bos_token": True, "bos_token": END})
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0})


def digits(folder: Path) -> None:
    """Byte-level BPE that splits digits and normalizes texts; old files beside it say otherwise."""
    tokenizer = byte_level()
    save_byte_level(folder, tokenizer)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    write(folder, "tokenizer.json", json.loads(tokenizer.to_str()))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0})


def fallback(folder: Path) -> None:
    """A BPE with byte fallback, with a start token before every text by its template."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer = trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainer,
        pre_tokenizer=pre_tokenizers.Metaspace("▁"),
        decoder=decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    )
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.pre_tokenizer = None
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = raw["added_tokens"][:3]
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    write(folder, "tokenizer.json", raw)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write(folder, "tokenizer_config.json", config | tokens)
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 2})


def gpt_sw3(folder: Path) -> None:
    """A SentencePiece file of a BPE with byte fallback, read by sentencepiece itself."""
    pieces(
        folder,
        "spiece.model",
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        pad_piece="<pad>",
        eos_piece=END,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    write(folder, "tokenizer_config.json", {"tokenizer_class": "GPTSw3Tokenizer"})
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 2, "eos_token_id": 3})


def xlm(folder: Path) -> None:
    """A SentencePiece file for XLM-R's tokenizer, whose ids are pieces + 1."""
    rules = charsmap(folder)
    pieces(folder, "sentencepiece.bpe.model", vocab_size=150, normalization_rule_tsv=rules)
    write(folder, "tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizer"})
    write(folder, "config.json", {"model_type": "gpt2"})


def plain(folder: Path) -> dict[str, Any]:
    """Write a SentencePiece file of no known class; return what sentencepiece makes of it."""
    rules = charsmap(folder)
    pieces(folder, "spiece.model", vocab_size=420, byte_fallback=True, normalization_rule_tsv=rules)
    processor = sentencepiece.SentencePieceProcessor(str(folder / "spiece.model"))
    ids = [processor.encode(text) for text in TEXTS]
    letters = [[processor.piece_to_id(f"<0x{byte:02X}>") for byte in row] for row in BYTES]
    rows = [[ids[1][0], *row, ids[1][0]] for row in letters] + letters
    return {
        "ids": ids,
        "texts": [processor.decode(row) for row in ids],
        "byte_ids": rows,
        "byte_texts": [processor.decode(row) for row in rows],
    }


def fast(folder: Path, tokenizer: Tokenizer, **tokens: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer as the class that the course on training a model from scratch uses."""
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def from_scratch(vocab_size: int, *special: str, texts: list[str] = SENTENCES[:1]) -> Tokenizer:
    """Return a byte-level BPE that was trained without all bytes as its alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def no_alphabet(folder: Path) -> None:
    """A tokenizer.json that lacks most bytes, as the course trains it."""
    tokenizer = from_scratch(60, END)
    fast(folder, tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)


def no_alphabet_files(folder: Path) -> None:
    """The same as vocab.json and merges.txt."""
    save_byte_level(folder, from_scratch(60, END))
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0})


def doubled(folder: Path) -> None:
    """A special token that merges make, too, so that its id is not in their order."""
    tokenizer = from_scratch(60, "END", texts=[*SENTENCES[:1], ENDS])
    fast(folder, tokenizer, bos_token="END", eos_token="END").save_pretrained(folder)


def doubled_files(folder: Path) -> None:
    """The same with all bytes, as vocab.json and merges.txt."""
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["END"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([ENDS, *SENTENCES[:1]], trainer)
    save_byte_level(folder, tokenizer)
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "END")
    write(folder, "special_tokens_map.json", tokens)
    write(folder, "config.json", {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0})


def dna(folder: Path) -> None:
    """Letters of DNA: a vocabulary of six tokens, none of which most texts have."""
    tokenizer = from_scratch(6, END, texts=["ACGTN"])
    fast(folder, tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)


def words(folder: Path) -> None:
    """Words added to GPT-2's own kind, in the layout of before 2023: added_tokens.json."""
    german(folder)
    size = len(json.loads((folder / "vocab.json").read_bytes()))
    added = {"COVID-19": size, "<sep>": size + 1, "<usr>": size + 2}
    write(folder, "added_tokens.json", added)
    tokens = {"additional_special_tokens": ["<usr>"], "bos_token": END, "eos_token": END}
    write(folder, "tokenizer_config.json", tokens)


def words_decoder(folder: Path) -> None:
    """The same in the layout since 2023; added_tokens.json, which repeats it, is gone."""
    words(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    listed = {
        id: {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for id, token in loaded.added_tokens_decoder.items()
    }
    (folder / "added_tokens.json").unlink()
    (folder / "special_tokens_map.json").unlink()
    config = {"added_tokens_decoder": listed, "tokenizer_class": "GPT2Tokenizer"}
    tokens = {"bos_token": END, "eos_token": "<usr>", "additional_special_tokens": ["<usr>"]}
    write(folder, "tokenizer_config.json", config | tokens)


def words_json(folder: Path) -> None:
    """Added words in a tokenizer.json; one is a part of another, and one is in the vocabulary."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["COVID-19", "<sep>", "<sep>2", "he"])
    tokenizer.add_special_tokens(["<usr>"])
    fast(folder, tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)


def strips(folder: Path) -> None:
    """Added tokens that take white space, stand for whole words or are normalized first."""
    tokenizer = byte_level()
    tokenizer.add_tokens(
        [
            AddedToken("<sep>", lstrip=True, rstrip=True),
            AddedToken("<word>", single_word=True),
            AddedToken("COVID-19", single_word=True, normalized=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True), "<usr>"])
    fast(folder, tokenizer, bos_token=END, eos_token=END, mask_token="<mask>").save_pretrained(
        folder
    )


def strips_decoder(folder: Path) -> None:
    """The same in tokenizer_config.json alone."""
    german(folder)
    size = len(json.loads((folder / "vocab.json").read_bytes()))
    flags = {"normalized": True, "special": False, "lstrip": False, "rstrip": False}
    flags |= {"single_word": False}
    both = {"content": "<sep>", "lstrip": True, "rstrip": True}
    mask = {"content": "<mask>", "lstrip": True, "special": True, "normalized": False}
    listed = {
        "0": flags | {"content": END, "special": True},
        size: flags | both,
        size + 1: flags | {"content": "<word>", "single_word": True},
        size + 2: flags | mask,
    }
    config = {"added_tokens_decoder": listed, "mask_token": "<mask>"}
    write(folder, "tokenizer_config.json", config | {"tokenizer_class": "GPT2Tokenizer"})
    (folder / "special_tokens_map.json").unlink()


def prefixed_words(folder: Path) -> None:
    """Added words where a space is put before every text."""
    prefixed(folder)
    size = len(json.loads((folder / "vocab.json").read_bytes()))
    write(folder, "added_tokens.json", {"COVID-19": size, "<sep>": size + 1})


FAMILIES: list[Callable[[Path], None]] = [
    goldfish, uer, rinna, kogpt2, german, prefixed, published, digits, fallback, gpt_sw3, xlm,
    no_alphabet, no_alphabet_files, doubled, doubled_files, dna, words, words_decoder, words_json,
    strips, strips_decoder, prefixed_words,
]  # fmt: skip


def facts(folder: Path) -> dict[str, Any]:
    """Return what transformers makes of the texts."""
    load = PreTrainedTokenizerFast if folder.name == "kogpt2" else AutoTokenizer
    tokenizer = load.from_pretrained(folder)
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    begun = [tokenizer.encode(text) for text in TEXTS]
    framed = begun[1][: len(begun[1]) - len(plain[1])]  # goldfish, uer, rinna, xlm: not ours
    begins = folder.name in ("prefixed", "prefixed_words", "fallback")
    decode = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    ordinary = [id for id in range(len(tokenizer)) if id not in tokenizer.all_special_ids]
    split = [
        tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        for text in TEXTS
    ]
    print(f"{folder.name}: {type(tokenizer).__name__}, {len(tokenizer)} tokens")
    return {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "start": framed if begins else [],
        "special": plain,
        "ids": split,
        "texts": [tokenizer.decode(ids, **decode) for ids in split],
        "words": {id: tokenizer.decode([*plain[1][-1:], id], **decode) for id in ordinary},
    }


def main() -> None:
    """Write all files."""
    shutil.rmtree(FOLDERS, ignore_errors=True)
    (FOLDERS / "plain").mkdir(parents=True)
    lines = [f'"texts": {json.dumps(TEXTS)}', f'"plain": {json.dumps(plain(FOLDERS / "plain"))}']
    (FOLDERS / "plain" / "rules.tsv").unlink()
    for family in FAMILIES:
        folder = FOLDERS / family.__name__
        folder.mkdir(parents=True)
        family(folder)
        (folder / "rules.tsv").unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary) / family.__name__
            shutil.copytree(folder, copy)
            lines.append(f'"{family.__name__}": {json.dumps(facts(copy))}')
    (GOLDEN / "tokenizers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")
    print(f"{sum(file.stat().st_size for file in FOLDERS.rglob('*')):,} bytes in {FOLDERS}")


if __name__ == "__main__":
    main()
