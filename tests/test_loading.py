"""Loading a model reads each of its files once."""

from collections import Counter

import gpt_cli
from gpt_cli import checkpoint, config


def test_loading_parses_the_configuration_and_the_header_once(case_folder, monkeypatch):
    parsed = Counter()

    def counting(read):
        return lambda path: parsed.update([path.name]) or read(path)

    monkeypatch.setattr(config, "read_json", counting(config.read_json))
    monkeypatch.setattr(checkpoint, "read_header", counting(checkpoint.read_header))
    gpt_cli.load(str(case_folder("saved")))
    assert parsed.pop("generation_config.json", 1) == 1
    assert parsed == {"config.json": 1, "model.safetensors": 1}
