import pytest

from gpt_cli.errors import InputError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2.tokens import check_ids, start_token


@pytest.mark.parametrize("id", [-1, 10, 2**70])
def test_an_id_that_the_model_does_not_have_is_refused(id):
    config = GPT2Config(vocab_size=10)
    assert check_ids(config, (0, 9)) == [0, 9]
    with pytest.raises(InputError, match=f"no token {id}; its ids are from 0 to 9"):
        check_ids(config, [0, id])


@pytest.mark.parametrize("bos", [None, 10, 11])
def test_a_model_without_a_start_token_says_why_one_is_needed(bos):
    assert start_token(GPT2Config(vocab_size=10, bos_token_id=9), "because") == 9
    with pytest.raises(InputError, match=r"^because, and this model has no start token"):
        start_token(GPT2Config(vocab_size=10, bos_token_id=bos), "because")
