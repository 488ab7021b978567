"""The tests of each module that `tools/mutants.py` changes, the fastest first.

A mutant ends at the first that fails. `tests/test_rooms.py` checks the names.
"""

from pathlib import Path

# Modules with one file of tests, of the same name.
ALONE = (
    "scoring/score texts/words gpt2/kv_cache folder/config "
    "options/declare records generation/speculate compression/range_coder "
    "jobs/parts jobs/parquet jobs/outputs gpt2/model serve/scheduler"
)
TESTS = {
    name: [str(Path(name).with_name(f"test_{Path(name).name}.py"))] for name in ALONE.split()
} | {
    "compression/archive": ["compression/test_archive.py", "compression/test_codec.py"],
    "compression/codec": ["compression/test_codec.py", "cli/test_compress.py"],
    "engine": [
        "test_engine.py",
        *(f"scoring/test_{name}.py" for name in ("score", "rank", "trace", "tree")),
        "jobs/test_tasks.py",
        "compression/test_codec.py",
    ],
    "folder/byte_bpe": ["folder/test_tokenizer.py"],
    **{
        f"folder/{name}": ["folder/test_pipeline.py", "cli/test_families.py"]
        for name in ("pipeline", "special_tokens", "tokenizer", "vocabularies")
    },
    "hub/client": ["hub/test_client.py", "faults/test_faults_hub.py"],
    "serve/choice": ["serve/test_responses.py", "serve/test_app.py"],
    "serve/responses": ["serve/test_responses.py", "serve/test_app.py"],
    "generation/generate": ["test_engine.py", "generation/test_generate.py"],
    "generation/row": [
        "test_engine.py",
        "generation/test_generate.py",
        "generation/test_drafts.py",
        "generation/test_speculate.py",
    ],
    "generation/drafts": ["generation/test_drafts.py", "generation/test_speculate.py"],
    "texts/speculator": ["generation/test_drafts.py", "generation/test_speculate.py"],
    "gpt2/assembly": ["gpt2/test_checkpoint.py", "gpt2/test_model.py", "gpt2/test_weights.py"],
    "gpt2/checkpoint": ["gpt2/test_checkpoint.py", "gpt2/test_model.py", "gpt2/test_quantize.py"],
    "options/request": ["options/test_declare.py", "generation/test_sampling.py"],
    "generation/sampling": ["generation/test_sampling.py", "cli/test_app.py"],
    "hub/local": ["hub/test_client.py"],
    "jobs/rows": ["jobs/test_rows.py", "jobs/test_parquet.py"],
    "jobs/storage": ["jobs/test_storage.py", "jobs/test_rows.py"],
    "jobs/sinks": ["jobs/test_runner.py"],
    "jobs/layout": ["jobs/test_layout.py", "jobs/test_tasks.py", "cli/test_rank.py"],
    "jobs/task": ["jobs/test_tasks.py", "jobs/test_runner.py"],
    "jobs/tasks/activations": [
        "jobs/test_tasks.py",
        "jobs/test_fields.py",
        "cli/test_activations.py",
        "cli/test_special.py",
    ],
    "jobs/tasks/choices": ["jobs/test_tasks.py", "cli/test_rank.py", "cli/test_constraint.py"],
    "jobs/tasks/classifying": [
        "jobs/test_fields.py",
        "cli/test_classify.py",
        "cli/test_special.py",
    ],
    "jobs/tasks/filtering": [
        "jobs/test_tasks.py",
        "jobs/test_outputs.py",
        "cli/test_score_rows.py",
    ],
    "jobs/tasks/generation": [
        "jobs/test_tasks.py",
        "jobs/test_fields.py",
        "cli/test_batch.py",
        "cli/test_constraint.py",
    ],
    "jobs/tasks/ranking": [
        "jobs/test_tasks.py",
        "jobs/test_edits.py",
        "cli/test_rank.py",
        "cli/test_special.py",
    ],
    "jobs/tasks/scoring": [
        "jobs/test_tasks.py",
        "jobs/test_fields.py",
        "cli/test_score_rows.py",
        "cli/test_score.py",
    ],
    "jobs/runner": ["jobs/test_runner.py"],
}
