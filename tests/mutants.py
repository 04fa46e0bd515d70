"""Break each guarantee by a small wrong change to a copy, and run the test that must fail.

    python tests/mutants.py            # all; exits with 1 if a change passes its test
    python tests/mutants.py norm crc   # those with one of these words in their line

First, all tests run once on an unchanged copy. A change that passes because it has no effect is
listed with the reason.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import conftest
import pytest
from conftest import ROOT

WORKERS = 2  # mutants at a time
QUIET_SECONDS = 120  # that the longest test needs on a quiet machine
MARKERS = {"test": "not slow and not ci", "ci": "not slow"}  # tests of make test; and of test-ci


class Mutant(NamedTuple):
    """A change of text that occurs once in a file, and the test in tests/ that fails with it."""

    file: str
    old: str
    new: str
    test: str
    part: str = "test"  # a key of MARKERS
    reason: str = ""  # why no test can fail


PARITY = "test_parity.py::test_ten_steps_equal_plain_pytorch[llama-2-{}]"
SKIP = "test_policies.py::test_all_optimizers_skip_a_step_that_is_bad_for_one[{}]"
BETWEEN = "test_runs.py::test_stopped_run_resumes_bit_for_bit_between_two_lines_of_its_log"
KILLED = "test_whole_runs.py::test_killed_run_resumes_bit_for_bit[T5_training]"
RELOAD = "test_export.py::test_exports_without_the_base_s_files_reload_with_equal_logits[{}]"
FINAL = "test_whole_runs.py::test_exports_reload_with_the_same_loss[T5_training]"
EDIT = "test_startup_checks.py::test_edit_is_refused_with_its_message[{}-fp32]"
ORDER = "test_steps.py::test_every_sample_occurs_once_per_epoch_at_any_world_size"
LENGTHS = "test_steps.py::test_length_groups_keep_every_sample_at_any_world_size"
SCHEDULE = "test_optimizers.py::test_schedules_follow_their_formulas"
NORM = "test_norm_that_is_not_finite_ends_the_run_unless_fp16_can_lower_its_scale"
NORM = f"test_policies.py::{NORM}[{{}}]"
SEED = "test_dropout_is_reseeded_by_seed_step_and_rank_for_other_processes"
SEED = f"test_checkpoint.py::{SEED}[3-cpu]"
SUMS = "test_checkpoint.py::test_each_rank_resumes_its_loss_sum_and_other_ranks_share_them"
ONCE = "test_steps.py::test_validation_batches_contain_each_sample_once"
MEAN = "test_log.py::test_validation_loss_is_the_mean_over_the_target_tokens_of_all_data_sets"
T5_INPUTS = "test_summarization_dataset.py::test_collate_builds_the_decoder_inputs_of_t5"
PACKED = "test_chat_dataset.py::test_collate_predicts_nothing_across_documents"
DAMAGED = "test_checkpoint.py::test_damaged_checkpoint_is_skipped[{}]"
SIGNAL = "test_ranks.py::test_signals_are_remembered_until_they_are_forgotten[{}]"
FP32 = "test_export.py::test_tensors_that_transformers_keeps_in_fp32_stay_so[{}]"

# By guarantee. The first ones are those of README.md, by their text in bold.
MUTANTS = {
    "The loss is exact": [
        # The step.
        Mutant("llama_fsdp.py", "loss * world_size", "loss", PARITY.format("full_shard")),
        Mutant("llama_fsdp.py", "targets, tokens, stops = ", "_, tokens, stops = ",
               PARITY.format("full_shard")),
        Mutant("llama_fsdp.py", "loss_sum += loss", "loss_sum = loss",
               PARITY.format("accumulate")),
        Mutant("llama_fsdp.py", "syncs = i == len(batches)", "syncs = i == 1",
               PARITY.format("fsdp2_accumulate_no_sync")),
        Mutant("core/weights.py", "whole = shard.to_local()", "whole = shard.to_local().flip(0)",
               PARITY.format("fsdp2")),
        Mutant("core/chunked_loss.py", "total += loss.detach()", "total = loss.detach()",
               "test_chunked_loss.py::test_chunked_loss_equals_plain_loss[GPTJ]"),
        Mutant("core/chunked_loss.py", "gradient_sum += gradient", "gradient_sum.copy_(gradient)",
               "test_chunked_loss.py::test_chunked_gradients_equal_plain_ones[token_loss-]"),
        # The norm.
        Mutant("policies.py", "return model.clip_grad_norm_(max_norm)",
               "return nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
               PARITY.format("full_shard")),
        Mutant("policies.py", "dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))",
               "pass", PARITY.format("fsdp2")),
        Mutant("policies.py", "is_bad = ~grad_norm.isfinite()", "is_bad = grad_norm.isnan()",
               SKIP.format("fsdp1-bf16-inf")),
        Mutant("policies.py", "elif is_bad:", "elif False:", SKIP.format("ddp-fp32-nan")),
        Mutant("policies.py", "optimizer._step_supports_amp_scaling = False", "pass",
               SKIP.format("fsdp1-fp16-nan")),
        # The schedule.
        Mutant("core/steps.py", "done / (total_steps - warmup_steps)", "done / total_steps",
               SCHEDULE),
        Mutant("core/steps.py", "(done + 1) / (warmup_steps + 1)", "done / warmup_steps", SCHEDULE),
        Mutant("llama_fsdp.py", "factors[step - 1]", "factors[step - 2]",
               PARITY.format("full_shard")),
        Mutant("core/steps.py", "if epoch != self.epoch:", "if True:", ORDER,
               reason="an epoch's order is drawn at each step: it is the same, and slower"),
        # The sampler, and parameter groups.
        Mutant("core/steps.py", "[rank :: self.sampler.world_size]", "[rank:]",
               ORDER),
        Mutant("core/steps.py", "math.ceil(num_samples / self.global_batch)",
               "num_samples // self.global_batch", ORDER),
        Mutant("chat_dataset.py", "return super().order(generator) + ",
               "return super().order(generator) + 0 * ",
               "test_steps.py::test_epochs_of_packs_have_indices_of_their_own"),
        Mutant("core/steps.py", "sampler.seed, rank, step", "sampler.seed, step",
               "test_steps.py::test_random_numbers_in_collate_depend_on_seed_rank_and_step_alone"),
        Mutant("core/steps.py", "self.seed * 1_000_003 + epoch", "self.seed + epoch",
               "test_steps.py::test_order_is_a_function_of_seed_and_epoch"),
        Mutant("core/steps.py", "if every != 0:", "if every is None:",
               "test_steps.py::test_due_steps_are_every_n_and_the_ends_of_epochs_and_of_the_run"
               "[3-steps0]"),
        Mutant("core/steps.py", '"weight_decay": 0.0', '"weight_decay": decay',
               "test_steps.py::test_weight_decay_excludes_biases_and_norms[gpt2_fsdp]"),
        Mutant("summarization_dataset.py", ".argmax()", ".argmin()", LENGTHS),
        Mutant("summarization_dataset.py", "order[len(whole) :]", "order[len(whole) : -1]",
               LENGTHS),
        # Packing and targets.
        Mutant("chat_dataset.py", "self.seed * 1_000_003 + epoch", "self.seed + epoch",
               "test_chat_dataset.py::test_packs_depend_on_seed_and_epoch"),
        Mutant("chat_dataset.py", "bisect_right(remaining, room) - 1", "0",
               "test_chat_dataset.py::test_pack_takes_the_longest_document_that_fits"),
        Mutant("chat_dataset.py", 'document["labels"][1:]', 'document["labels"][:-1]', PACKED),
        Mutant("chat_dataset.py", "np.arange(len(targets))", "np.arange(total)[-len(targets) :]",
               PACKED),
        Mutant("chat_dataset.py", "zeros - 100", "zeros", PACKED),
        Mutant("block_dataset.py", "labels = padded[:, 1:]", "labels = padded[:, :-1]",
               "test_block_dataset.py::test_blocks_predict_every_token_once"),
        Mutant("summarization_dataset.py", ".roll(1, dims=1)", "", T5_INPUTS),
        Mutant("summarization_dataset.py", "(labels != -100).long()", "(labels != 0).long()",
               T5_INPUTS),
        # Validation.
        Mutant("T5_training.py", 'total[1] += batch["targets"]', "total[1] += 1", FINAL),
        Mutant("core/log.py", "mean = total_loss / total_targets",
               "mean = sum(x[0] / x[1] for x in totals.values()) / len(totals)", MEAN),
        Mutant("core/steps.py", "[dist.get_rank() :: world_size]", "[:]", ONCE),
        Mutant("core/steps.py", "for start in indices[::global_batch]",
               "for start in indices[dist.get_rank() :: global_batch]", ONCE),
    ],
    "Startup checks reject the kinds of wrong model that we know": [
        Mutant("optional/startup_checks.py", "second[:common], noise,", "second[:common], 9,",
               EDIT.format("GPT-2: not causal")),
        Mutant("optional/startup_checks.py", "_check_equal(document, after_itself, noise, LEAK)",
               "pass", EDIT.format("Llama: absolute positions")),
        Mutant("optional/startup_checks.py", "torch.cat(own), max(rounding, 1e-5),",
               "torch.cat(own), 9,", EDIT.format("T5: another start")),
    ],
    "Killing a run does not change its results": [
        Mutant("core/checkpoint.py", "load_moments(path, model, optimizers)\n    load_random",
               "load_random", KILLED),
        Mutant("core/checkpoint.py", "load_random_states(path, saved)  # last", "pass  # last",
               BETWEEN),
        Mutant("core/checkpoint.py", "key + rank", "key", KILLED),
        Mutant("gpt2_fsdp.py", "torch.tensor(state.own_loss_sum(),", "torch.tensor(0.0,", BETWEEN),
        Mutant("core/checkpoint.py", "sum(self.loss_sums) / world_size", "sum(self.loss_sums)",
               SUMS),
        Mutant("core/checkpoint.py", " + dist.get_rank()\n        )", "\n        )", SEED),
        Mutant("T5_training.py", "manual_seed(optim.seed + dist.get_rank())",
               "manual_seed(optim.seed)", "test_steps.py::test_dropout_differs_between_ranks"),
        Mutant("gpt2_fsdp.py", "state.scaler or scaler.state_dict()", "scaler.state_dict()",
               "test_runs.py::test_scale_of_fp16_is_resumed", "ci"),
        Mutant("core/checkpoint.py", 'path / f"{STATE}.tmp"', "path / STATE",
               "test_checkpoint.py::test_train_state_is_complete_or_absent[write_text]"),
        Mutant("core/checkpoint.py", 'values.pop("crc") == crc_of(values)',
               'values.pop("crc") is not None',
               "test_checkpoint.py::test_flipped_bits_of_train_state_are_noticed"),
        Mutant("optional/checksums.py", "if crcs(path / name) != sums[name]:", "if False:",
               DAMAGED.format("__0_0.distcp-flipped bit")),
        Mutant("core/checkpoint.py", 'sizes == values["files"]',
               'sizes.keys() == values["files"].keys()',
               "test_checkpoint.py::test_truncated_file_makes_a_checkpoint_incomplete"),
        Mutant("core/checkpoint.py", "[-keep:]", "[:keep]",
               "test_checkpoint.py::test_prune_keeps_the_newest_complete_checkpoints"),
        Mutant("core/log.py", 'event["step"] < step or', 'event["step"] <= step + 1 or',
               "test_log.py::test_events_that_will_be_repeated_and_broken_lines_are_deleted"),
        Mutant("core/checkpoint.py", "if value != was:", "if False:",
               "test_runs.py::test_resume_rejects_changed_data_and_models", "ci"),
        Mutant("optional/lock.py", "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
               "test_lock.py::test_lock_is_refused_while_its_process_lives"),
        Mutant("core/checkpoint.py", "if isinstance(model, FSDP):  # free", "if False:  # free",
               BETWEEN,
               reason="what would be freed is replaced by the loaded moments"),
    ],
    "Stopping a run loses no work": [
        Mutant("core/ranks.py", "self.is_set = True", "pass", SIGNAL.format(15)),
        Mutant("core/ranks.py", "signal.SIGHUP, ", "", SIGNAL.format(1)),
        Mutant("gpt2_fsdp.py", "if save_due or is_stopping:", "if save_due:", BETWEEN),
        Mutant("gpt2_fsdp.py", "if i % 8 == 0:", "if i == 0:",
               "test_runs.py::test_validation_asks_for_a_stop_at_every_eighth_batch"),
        Mutant("gpt2_fsdp.py", "except Stopped:\n        return True",
               "except Stopped:\n        return False",
               "test_best.py::test_resume_after_stop_during_export_repeats_validation", "ci"),
        Mutant("gpt2_fsdp.py", "if bad_step:", "if False:",
               "test_runs.py::test_nan_loss_ends_all_ranks_and_saves_nothing", "ci"),
        Mutant("policies.py", "if not norm.isfinite() and", "if norm.isnan() and",
               NORM.format("inf")),
        Mutant("policies.py", "scaler.get_scale() <= 1", "scaler.get_scale() < 1",
               NORM.format("nan")),
    ],
    "Only rank 0 reads the model's files": [
        Mutant("core/weights.py", "_tie_as(model, on_rank_zero(load))", "_tie_as(model, load())",
               "test_weights.py::test_only_rank_0_reads_the_files", "ci"),
    ],
    "Exports are plain Hugging Face models": [
        Mutant("core/export.py", "torch.float32 if keeps else dtype", "dtype",
               FP32.format("T5ForConditionalGeneration-settings0-fp16")),
        Mutant("core/export.py", "if tensor.is_floating_point():", "if False:",
               FP32.format("DeepseekV3ForCausalLM-settings1-bf16")),
        Mutant("core/export.py", "if is_untied:", "if False:",
               "test_export.py::test_settings_go_out_as_they_came_in[flan-t5-of Transformers 5]"),
        Mutant("core/export.py", 'getattr(model, "exported_config", model.config)', "model.config",
               RELOAD.format("llama-of Transformers 5")),
        Mutant("core/export.py", "model_weights(model, weights.saved_names(model))",
               "model_weights(model, {name for name, _ in plain.named_parameters()})",
               "test_export.py::test_buffers_of_the_files_are_exported"),
        Mutant("core/export.py", 'target.with_name(f"tmp-{target.name}")', "target",
               "test_export.py::test_complete_export_replaces_the_target_of_a_link"),
        Mutant("gpt2_fsdp.py", "if loss < state.best_loss:", "if True:",
               "test_runs.py::test_validation_before_training_counts_for_best", "ci"),
        Mutant("optional/save_best.py", "state.best_loss = math.inf", "pass",
               "test_best.py::test_best_of_abandoned_steps_is_replaced", "ci"),
        Mutant("core/export.py", "clear(old)\n    if target",
               "if target", "test_export.py::test_complete_export_replaces_the_target_of_a_link"),
    ],
    "Code in a model, a data set or a checkpoint is never executed": [
        Mutant("core/weights.py", "trust_remote_code=False", "trust_remote_code=True",
               "test_safe_checkpoint.py::test_code_of_a_model_is_never_run[config.json]"),
        Mutant("optional/safe_checkpoint.py", "if is_dtype or", "if True or",
               "test_safe_checkpoint.py::test_hostile_checkpoint_runs_no_code[add_code-mkdir]",
               "ci"),
    ],
    "A user error produces one message": [
        Mutant("core/weights.py", 'raise Problem(f"{name} is not a directory',
               'raise RuntimeError(f"{name} is not a directory',
               "test_whole_runs.py::test_bad_input_exits_with_one_message"
               "[T5_training-changed0-directory is not a directory]"),
        Mutant("core/ranks.py", "isinstance(error, OSError | MemoryError | Problem)",
               "isinstance(error, OSError)",
               "test_ranks.py::test_error_of_one_rank_ends_all_with_one_message", "ci"),
    ],
    "Weights and rows are those of the files": [
        Mutant("prepare/chats.py", "[-100] * len(prompt) + ids[len(prompt) :]", "list(ids)",
               "test_chat_dataset.py::test_labels_are_exactly_the_answers[qwen 2.5-plain]"),
        Mutant("prepare/chats.py", "if labels[-1] != -100 and ids[-1] != eos:", "if False:",
               "test_chat_dataset.py::test_last_answer_gets_one_eos"),
        Mutant("prepare/chats.py", "{*labels[:length]} != {-100}", "True",
               "test_chat_dataset.py::test_prompts_longer_than_the_sequence_are_dropped"),
        Mutant("prepare/pairs.py", "[*whole[: limits[flag] - 1], eos]", "whole[: limits[flag]]",
               "test_summarization_dataset.py::test_encoded_texts_end_with_eos[True]"),
        Mutant("prepare/texts.py", "pending[start : start + size + 1]",
               "pending[start : start + size]",
               "test_block_dataset.py::test_blocks_predict_every_token_once"),
        Mutant("prepare/texts.py", "[*ids, tokenizer.eos_token_id]", "[*ids]",
               "test_block_dataset.py::test_rows_are_joined_with_eos[rows.jsonl]"),
        Mutant("prepare/sets.py", '"train": ~is_held_out', '"train": keys >= 0',
               "test_block_dataset.py::test_end_is_held_out_without_validation_data"),
        Mutant("prepare/sets.py", "is_held_out = keys <", "is_held_out = keys <=",
               "test_data.py::test_hold_out_keeps_equal_rows_together[sizes0]"),
        Mutant("prepare/tables.py", "if largest >= size:", "if largest > size:",
               "test_data.py::test_row_with_a_token_that_the_embedding_lacks_is_a_bad_row[row0]"),
        Mutant("prepared_dataset.py", "(path / file).read_bytes()) != crc", "b'') and crc",
               "test_prepare.py::test_damaged_directory_is_refused_with_one_message[flipped bit]",
               "ci"),
        Mutant("core/weights.py", "if problems:", "if False:",
               "test_weights.py::test_all_problems_of_weights_are_one_error"),
        Mutant("core/checkpoint.py", "range(0, len(samples), step)", "range(1)",
               "test_data.py::test_fingerprint_sees_changes"),
    ],
}  # fmt: skip


def copy_tree(directory: Path) -> None:
    """Copy the files that git tracks, as they are now."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def run_tests(
    part: str, tests: list[str], quiet_seconds: float, change: Mutant | None = None
) -> subprocess.CompletedProcess:
    """Run tests of one part in a copy with a change; in a fork, which need not import PyTorch."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        copy_tree(tree)
        if change:
            file = tree / change.file
            file.write_text(file.read_text().replace(change.old, change.new))
        words = ["-q", "-m", MARKERS[part], "-p", "no:cacheprovider", "--basetemp", tree / "tmp"]
        words = [Path(pytest.__file__).with_name("__main__.py"), *words]
        argv = [*map(str, words), *(f"tests/{test}" for test in tests)]
        environment = os.environ | {"HF_DATASETS_CACHE": f"{directory}/cache"}
        return conftest.fork(0, argv, quiet_seconds, None, tree, environment)


def check_unchanged(part: str, mutants: list[Mutant]) -> str:
    """Run the tests of mutants without a change. Return the output if not all run and pass."""
    tests = list(dict.fromkeys(mutant.test for mutant in mutants if mutant.part == part))
    if not tests:
        return ""
    result = run_tests(part, tests, QUIET_SECONDS * 10)
    is_good = result.returncode == 0 and re.search(rf"\b{len(tests)} passed", result.stdout)
    return "" if is_good else f"{result.stdout[-9000:]}{result.stderr[-9000:]}"


def verdict(mutant: Mutant) -> tuple[bool, str]:
    """Return whether all is as it should be, and a line that says what happened."""
    change = f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}"
    count = (ROOT / mutant.file).read_text().count(mutant.old)
    if count != 1:
        return False, f"NOT TRIED: the text occurs {count} times | {change}"
    code = run_tests(mutant.part, [mutant.test], QUIET_SECONDS, mutant).returncode
    test = f"tests/{mutant.test}"
    if code == 0 and mutant.reason:
        return True, f"survived {test}, because {mutant.reason} | {change}"
    if code == 0:
        return False, f"SURVIVED {test} | {change}"
    if code == 1:
        return not mutant.reason, f"caught by {test} | {change}"
    return False, f"NOT DECIDED: exit code {code} of {test} | {change}"


def missing_guarantees() -> Iterator[str]:
    """Yield a line for each guarantee in README.md without a mutant that a test file which it names
    catches."""
    section = (ROOT / "README.md").read_text().partition("## Guarantees\n")[2].partition("\n## ")[0]
    for text in " ".join(section.split()).split("- **")[1:]:
        title = text.partition("**")[0].strip(".")
        files = set(re.findall(r"tests/(\w+\.py)", text))
        if files.isdisjoint(mutant.test.partition("::")[0] for mutant in MUTANTS.get(title, [])):
            yield f"README.md: {title}: no mutant for {sorted(files)}"


def main() -> int:
    """Print a line for each mutant. Return 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    mutants = []
    for guarantee, group in MUTANTS.items():
        for mutant in group:
            text = " ".join([guarantee, *mutant]).lower()
            if not words or any(word.lower() in text for word in words):
                mutants.append(mutant)
    problems = [] if words else list(missing_guarantees())
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    server = conftest.start_fork_server()
    with ThreadPoolExecutor(WORKERS) as pool:
        problems += filter(None, pool.map(check_unchanged, MARKERS, [mutants] * len(MARKERS)))
        if problems:
            print("\n".join(problems))
            return 1
        are_good = []
        for is_good, line in pool.map(verdict, mutants):
            print(line, flush=True)
            are_good.append(is_good)
    server.communicate()  # ends it
    usages = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    count = are_good.count(False)
    print(f"{len(mutants)} mutants, {count} not as they should be, {seconds:,.0f} CPU seconds")
    return int(not all(are_good))


if __name__ == "__main__":
    sys.exit(main())
