"""The plan of the house: small rooms, and tests that mirror them."""

import re
from pathlib import Path

from tools import mutant_tests

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "gpt_cli"
ROOMS = [PACKAGE, *(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())]


def test_rooms_are_small():
    sizes = {room.name: len(list(room.glob("*.py"))) for room in ROOMS}
    assert sizes.pop("gpt_cli") <= 8
    assert {name: size for name, size in sizes.items() if size > 16 + 1} == {}  # and __init__.py


def test_every_folder_of_tests_is_a_room():
    others = {"faults", "fuzz", "golden", "kept", "native", "support"}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - others
    assert {name for name in folders if name[:2] != "__"} <= {room.name for room in ROOMS}


def test_no_test_imports_another():
    # By the first name of a module. One line imports one module: see the rules of ruff.
    first_names = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)
    modules = {path.stem for path in TESTS.rglob("test_*.py")}
    imported = {path: first_names.findall(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    assert {path.name: names for path, names in imported.items() if modules & {*names}} == {}


# Modules that a neighbour's tests cover, by the test module.
COVERED = {
    "jobs/test_rows.py": ["jobs/reader"],
    "checks/test_bench.py": ["checks/plan"],
    "checks/test_verify.py": ["checks/computed", "cli/commands/checks"],
    "cli/test_activations.py": ["jobs/arrays"],
    "cli/test_app.py": [
        "cli/commands/generate",
        "cli/flags",
        "cli/output",
        "cli/parameters",
        "system/signals",
        "system/startup",
    ],
    "cli/test_batch.py": ["cli/progress"],
    "cli/test_bench.py": ["cli/bench_format", "cli/files"],
    "cli/test_classify.py": ["jobs/tasks/classifying"],
    "cli/test_score.py": ["cli/score_format"],
    "cli/test_show.py": [f"cli/show/{x}" for x in ("commands", "picture", "terminal")],
    "cli/test_vector.py": ["scoring/vectors"],
    "display/test_page.py": ["display/colours", "display/labels", "display/views"],
    "display/test_results.py": ["texts/result"],
    "gpt2/test_edits.py": ["folder/array_file"],
    "gpt2/test_edits_in_python.py": ["options/edit"],
    "gpt2/test_model.py": ["gpt2/run_state"],
    "gpt2/test_weights.py": ["gpt2/assembly"],
    "compression/test_codec.py": ["gpt2/digests"],
    "folder/test_pipeline.py": ["folder/special_tokens", "folder/vocabularies"],
    "folder/test_tokenizer.py": ["folder/base_tokenizer", "folder/byte_bpe", "folder/contents"],
    "generation/test_generate.py": ["generation/row"],
    "gpt2/test_adapter.py": ["folder/adapter"],
    "gpt2/test_checkpoint.py": ["folder/tensors", "folder/weight_files"],
    "hub/test_client.py": ["hub/connection", "hub/local", "hub/messages", "hub/target"],
    "jobs/test_outputs.py": ["jobs/jsonl"],
    "jobs/test_runner.py": ["jobs/sinks"],
    "jobs/test_tasks.py": [
        "jobs/task",
        *(f"jobs/tasks/{x}" for x in ("activations", "choices", "filtering")),
        *(f"jobs/tasks/{x}" for x in ("generation", "ranking", "scoring")),
    ],
    "ops/test_gpu.py": ["ops/select", "system/gpu"],
    "ops/test_launches.py": ["ops/cuda/launcher"],
    "ops/test_many_rows.py": ["ops/cuda/decoding", "ops/cuda/layers"],
    "ops/test_cupy_models.py": ["ops/cuda/passes"],
    "ops/test_native_pool.py": ["ops/memory", "ops/packing"],
    "ops/test_structs.py": ["ops/kernels"],
    "ops/test_ops.py": ["ops/contract", "ops/numpy_ops"],
    "options/test_declare.py": ["options/request"],
    "serve/test_responses.py": ["serve/choice", "serve/metrics", "serve/refusals"],
    "serve/test_app.py": ["serve/dialects", "serve/protocol"],
    "serve/test_requests.py": ["serve/answers"],
    "serve/test_scheduler.py": ["serve/prompts"],
    "serve/test_server.py": [
        "cli/commands/serve",
        "serve/front/guard",
        "serve/front/keys",
        "serve/front/log",
        "serve/front/proxies",
        "serve/front/sockets",
        "serve/front/systemd",
        "serve/settings",
    ],
    "test_devices.py": ["ops/cuda/placed"],
    "texts/test_states.py": ["texts/text"],
    "scoring/test_classify.py": ["gpt2/classifier"],
    "generation/test_speculate.py": ["texts/speculator"],
    "test_kinds.py": ["folder/settings"],
    "test_ray.py": ["jobs/cluster", "ray/data"],
    "test_ray_serve.py": ["ray/replicas", "ray/serving"],
}


def test_every_module_is_covered_by_its_namesake_or_a_named_neighbour():
    elsewhere = sorted(name for names in COVERED.values() for name in names)
    alone = []
    for path in PACKAGE.rglob("[!_]*.py"):
        name = path.relative_to(PACKAGE).with_suffix("")
        room = TESTS / name.parts[0] if len(name.parts) > 1 else TESTS
        stem = name.name.removesuffix("_ops")
        if not [*room.glob(f"test_{name.name}.py"), *room.glob(f"test_{stem}_*.py")]:
            alone.append(name.as_posix())
    assert sorted(alone) == elsewhere
    assert all((TESTS / file).is_file() for file in COVERED)


def test_what_mutation_testing_names_exists():
    page = (TESTS / "MUTANTS.md").read_text("utf-8")
    listed = {*re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)} - {"kernels.c"}
    tests = mutant_tests.TESTS
    assert listed - tests.keys() == set()
    assert [name for name in tests if not (PACKAGE / f"{name}.py").is_file()] == []
    files = {file for of_module in tests.values() for file in of_module}
    assert {file for file in files if not (TESTS / file).is_file()} == set()
