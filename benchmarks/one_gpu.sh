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
# torchrun ends ranks that ignore SIGTERM after this time.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5

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
        grep -E "^\| |batch that fits|[0-9]+ (passed|failed|skipped)" "$out/$name.txt"
    } | tee -a "$out/summary.txt"
    return $code
}

tests() {  # NAME SECONDS FLAGS...: run tests, on many cores if pytest-xdist is installed
    local name=$1 limit=$2
    shift 2
    python -c "import xdist" 2>/dev/null && [ -z "$tiny" ] && set -- -n 12 "$@"
    run "$name" "$limit" -m pytest -p no:cacheprovider "$@"
}

phase_a() {  # several ranks on this GPU: losses, a kill, a resume with other ranks, the export
    run a-build 90 tests/gpu/staged.py || return
    tests a-ranks 170 tests/test_ranks_on_one_gpu.py ${tiny:+-m "not slow"}
}

phase_b() {  # one rank of many: its peak against the estimate
    local small="llama-2-7b --steps 4" large="llama-2-70b --steps 2" fsdp
    [ -z "$tiny" ] || small="tiny --length 64 --steps 1" large=$small
    for fsdp in 1 2; do
        run b-7b-fsdp$fsdp 50 benchmarks/one_rank_of_many.py --ranks 8 --model $small --fsdp $fsdp
    done
    for fsdp in 1 2; do
        run b-70b-fsdp$fsdp 90 benchmarks/one_rank_of_many.py --ranks 32 --model $large \
            --fsdp $fsdp
    done
}

phase_c() {  # 7B on this GPU: tokens/s and MFU
    local ours="benchmarks/one_gpu.py --turns 1 --loops ours --steps 5"
    [ -z "$tiny" ] || ours+=" --model tiny --length 64"
    run c-batch-4 50 $ours --batch-size 4
    run c-batch-1 40 $ours
    run c-not-recomputed 40 $ours --no-activation-checkpointing
    run c-compiled 90 $ours --compile
    run c-qlora 60 $ours --lora-rank 16 --load-in-4bit --memory-limit-gb 24
}

phase_d() {  # the Trainer beside our scripts
    local theirs="benchmarks/one_gpu.py --turns 1 --steps 5" side="--preset gpu --rows 400"
    [ -z "$tiny" ] || theirs+=" --model tiny --length 64" side="--preset cpu --rows 40"
    run d-7b 60 $theirs --loops trainer
    run d-7b-lora 80 $theirs --lora-rank 16
    run d-gpt2-large 80 benchmarks/side_by_side.py $side --processes 1 --peers trainer --epochs 1
}

phase_e() {  # the largest batch of rank 0 of 2 in 24 GB, as in huggingface.co/blog/pytorch-fsdp
    local search="--ranks 2 --length 128 --precision fp32 --memory-limit-gb 24 --largest-batch"
    local models="gpt2-xl gpt2-large" model strategy at_once
    local strategies=(full_shard shard_grad_op ddp)
    [ -z "$tiny" ] || models="tiny-gpt2" search+=" --max-batch-size 2"
    # Offloaded shards are pinned, which needs a GPU.
    [ -n "$tiny" ] || strategies+=("full_shard --cpu-offload" "shard_grad_op --cpu-offload")
    at_once=$(python -c "import torch; print(torch.cuda.mem_get_info()[1] // 26_000_000_000)")
    for model in $models; do
        for strategy in "${strategies[@]}"; do
            while (($(jobs -rp | wc -l) >= ${at_once:-2})); do
                wait -n
            done
            run "e-$model-${strategy// --/-}" 60 benchmarks/one_rank_of_many.py --model "$model" \
                $search --strategy $strategy &
        done
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
