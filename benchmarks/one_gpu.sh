#!/bin/bash
# Measure and test on one borrowed GPU in ten minutes, the most important first.
#
#   bash benchmarks/one_gpu.sh OUT              # phases a to f, below
#   bash benchmarks/one_gpu.sh OUT e f          # only these
#   TINY=1 bash benchmarks/one_gpu.sh OUT       # tiny models on a CPU: does each command start?
#
# Each command has a limit, and all together LIMIT seconds. Its output goes to OUT/NAME.txt as it
# comes, and its exit code and tables to OUT/summary.txt, so a run that is cut off keeps its results.
#
# torch 2.11 and Transformers 5.17 are enough. Phases c and d need 120 GB of GPU memory. Without a
# network, carry wheels/, made by the command below. LoRA also needs peft, QLoRA bitsandbytes.
#
#   pip wheel --no-deps -w wheels tyro docstring-parser typeguard datasets multiprocess dill \
#       filelock nltk defusedxml rouge-score ninja pytest-xdist execnet
# shellcheck disable=SC2086  # words of commands are split
set -u
cd "$(dirname "$0")/.." || exit 1
out=$(realpath -m "$1")
shift
phases=${*:-a b c d e f}
deadline=$((SECONDS + ${LIMIT:-585}))
tiny=${TINY:-}
mkdir -p "$out"
export HF_HUB_OFFLINE=1 STAGED_BUILD=${STAGED_BUILD:-$out/staged}
export PYTORCH_ALLOC_CONF=expandable_segments:True PYTHONUNBUFFERED=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5  # then torchrun ends ranks that ignore SIGTERM

run() {  # NAME SECONDS COMMAND...: run a Python program for at most so many seconds
    local name=$1 limit=$2 start=$SECONDS left=$((deadline - SECONDS))
    shift 2
    if ((left < 5)); then
        echo "$name: no time left" | tee -a "$out/summary.txt"
        return 1
    fi
    [ -z "$tiny" ] || limit=$((10 * limit))  # the CPU may be slow
    ((limit < left)) || limit=$left
    timeout --kill-after=10 "$limit" python "$@" >"$out/$name.txt" 2>&1
    local code=$?
    {
        echo "$name: exit code $code after $((SECONDS - start)) of $limit s"
        grep -E "^\| |[0-9]+ (passed|failed|skipped)" "$out/$name.txt"
    } | tee -a "$out/summary.txt"
    return $code
}

tests() {  # NAME SECONDS FLAGS...: run tests, on many cores if pytest-xdist is installed
    local name=$1 limit=$2
    shift 2
    python -c "import xdist" 2>/dev/null && [ -z "$tiny" ] && set -- -n 12 "$@"
    run "$name" "$limit" -m pytest -p no:cacheprovider "$@"
}

memory() {  # NAME SECONDS MODEL FLAGS...: run benchmarks/memory.py
    local name=$1 limit=$2 model=$3
    shift 3
    [ -z "$tiny" ] || set -- "$@" --length 64 --steps 1 --max-batch-size 2
    [ -z "$tiny" ] || model=${tiny_model:-tiny}
    run "$name" "$limit" benchmarks/memory.py --models "$model" "$@"
}

phase_a() {  # several ranks on this GPU: losses, a kill, a resume with other ranks, the export
    run a-build 90 tests/gpu/staged.py || return
    tests a-ranks 170 tests/test_ranks_on_one_gpu.py ${tiny:+-m "not slow"}
}

phase_b() {  # one rank of many: its peak against the estimate
    memory b-7b 100 llama-2-7b --ranks 8 --length 4096 --strategies full_shard "full_shard --fsdp 2"
    memory b-70b 180 llama-2-70b --ranks 32 --length 4096 \
        --strategies full_shard "full_shard --fsdp 2"
}

phase_c() {  # 7B on this GPU: tokens/s and TFLOP/s
    local ours="--processes 1 --length 4096 --steps 5 --strategies"
    memory c-batch-4 50 llama-2-7b $ours full_shard --batch-size 4
    memory c-batch-1 130 llama-2-7b $ours full_shard "full_shard --activation-checkpointing none"
    [ -n "$tiny" ] || memory c-compiled 90 llama-2-7b $ours "full_shard --compile"
    memory c-qlora 60 llama-2-7b $ours "full_shard --lora-rank 16 --load-in-4bit" --memory-limit-gb 24
}

phase_d() {  # the Trainer beside our scripts
    local side="--preset gpu" steps=20
    [ -z "$tiny" ] || side="--preset cpu --rows 100" steps=1
    run d-gpt2-large 80 benchmarks/speed.py $side --processes 1 --against trainer --steps $steps
}

phase_e() {  # the largest batch of rank 0 of 2 in 24 GB, as in huggingface.co/blog/pytorch-fsdp
    local search="--ranks 2 --length 128 --precision fp32 --memory-limit-gb 24 --largest-batch --steps 1"
    local strategies=(full_shard shard_grad_op ddp) model tiny_model=tiny-gpt2
    # Offloaded shards are pinned, which needs a GPU.
    [ -n "$tiny" ] || strategies+=("full_shard --cpu-offload" "shard_grad_op --cpu-offload")
    for model in gpt2-xl gpt2-large; do
        memory "e-$model" 240 "$model" $search --strategies "${strategies[@]}" &
    done
    wait
}

phase_f() {  # the tests for GPUs that have not run, of Llama and of kills
    tests f-tests 150 tests/test_gpu.py -k "llama_fsdp or not script_resumes" -m "not slow"
}

[ ! -d wheels ] || python -m pip install --quiet --no-deps --no-index wheels/*.whl
for phase in $phases; do
    "phase_$phase"
done
exit 0 # OUT/summary.txt has the exit codes
