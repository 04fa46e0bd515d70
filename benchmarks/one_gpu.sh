#!/bin/bash
# Measure and test on one borrowed GPU in ten minutes, the most important first.
#
#   bash benchmarks/one_gpu.sh OUT              # phases a to g, below
#   bash benchmarks/one_gpu.sh OUT e f          # only these
#   TINY=1 bash benchmarks/one_gpu.sh OUT       # tiny models on a CPU: does each command start?
#
# Each command has a limit, and all together LIMIT seconds (default: 585, with TINY 7200). After
# each, OUT has two files: summary.txt with its exit code and tables, and logs.tgz with the output
# of all. So a run that is cut off keeps its results. PYTHON is the interpreter (default: python3).
#
# torch 2.11 and Transformers 5.17 are enough. The 7B needs 120 GB of GPU memory. Without a
# network, carry wheels/, made by the command below.
#
#   pip wheel --no-deps -w wheels tyro docstring-parser typeguard datasets multiprocess dill \
#       filelock nltk defusedxml rouge-score ninja pytest-xdist execnet
# shellcheck disable=SC2086  # words of commands are split
set -u
cd "$(dirname "$0")/.." || exit 1
out=$(realpath -m "$1")
shift
phases=${*:-a b c d e f g}
tiny=${TINY:-}
all=585
[ -z "$tiny" ] || all=7200  # as for each command, the CPU may be slow
deadline=$((SECONDS + ${LIMIT:-$all}))
python=${PYTHON:-python3}
logs=$(mktemp -d)
mkdir -p "$out"
export HF_HUB_OFFLINE=1 STAGED_BUILD=${STAGED_BUILD:-$logs/staged}
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
    timeout --kill-after=10 "$limit" "$python" "$@" >"$logs/$name.txt" 2>&1
    local code=$?
    {
        echo "$name: exit code $code after $((SECONDS - start)) of $limit s"
        grep -E "^\| |PASSED|FAILED|[0-9]+ (passed|failed|skipped)" "$logs/$name.txt"
    } | tee -a "$out/summary.txt"
    flock "$logs" tar -czf "$out/logs.tgz" -C "$logs" --exclude=./staged .
    return $code
}

tests() {  # NAME SECONDS FLAGS...: run tests, on many cores if pytest-xdist is installed
    local name=$1 limit=$2
    shift 2
    "$python" -c "import xdist" 2>/dev/null && [ -z "$tiny" ] && set -- -n 12 "$@"
    run "$name" "$limit" -m pytest -v -p no:cacheprovider "$@"
}

memory() {  # NAME SECONDS MODEL FLAGS...: run benchmarks/memory.py
    local name=$1 limit=$2 model=$3
    shift 3
    [ -z "$tiny" ] || set -- "$@" --length 64 --steps 1 --max-batch-size 2
    [ -z "$tiny" ] || model=${tiny_model:-tiny}
    run "$name" "$limit" benchmarks/memory.py --models "$model" "$@"
}

ours="--processes 1 --length 4096 --steps 5 --strategies"
two_ranks="2ranks or bf16"

phase_a() {  # 7B on this GPU, four sequences: the tokens/s and TFLOP/s to quote
    memory a-batch-4 120 llama-2-7b $ours full_shard --batch-size 4
}

phase_b() {  # two ranks on this GPU, by variant: losses and exports
    if ((build)); then
        wait "$build"
    fi
    tests b-two-ranks 150 tests/test_ranks_on_one_gpu.py -k "$two_ranks" ${tiny:+-m "not slow"}
}

phase_c() {  # one rank of many under FSDP2: its peak against the estimate
    memory c-7b 50 llama-2-7b --ranks 8 --length 4096 --strategies "full_shard --fsdp 2"
    memory c-70b 90 llama-2-70b --ranks 32 --length 4096 --strategies "full_shard --fsdp 2"
}

phase_d() {  # 7B with less recomputation, and compiled
    memory d-selective 80 llama-2-7b $ours "full_shard --activation-checkpointing selective"
    memory d-none 80 llama-2-7b $ours "full_shard --activation-checkpointing none"
    [ -n "$tiny" ] || memory d-compiled 100 llama-2-7b $ours \
        "full_shard --compile --activation-checkpointing selective"
}

phase_e() {  # one rank of many under FSDP1, and the Trainer beside our scripts
    memory e-7b 50 llama-2-7b --ranks 8 --length 4096 --strategies full_shard
    memory e-70b 90 llama-2-70b --ranks 32 --length 4096 --strategies full_shard
    local side="--preset gpu" steps=20
    [ -z "$tiny" ] || side="--preset cpu --rows 100" steps=1
    run e-trainer 80 benchmarks/speed.py $side --processes 1 --against trainer \
        --steps $steps
}

gradients='
import sys
sys.path.insert(0, ".")
import torch, transformers, policies
device = "cuda" if torch.cuda.is_available() else "cpu"
config = transformers.GPT2Config(n_layer=2, vocab_size=64, attn_implementation="sdpa")
def gradients(kind):  # of a GPT-2 with its dropout of 0.1, in bf16, which has fused kernels
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).to(device).train()
    if kind != "none":
        blocks = (type(model.transformer.h[0]),)
        policies.checkpoint_blocks(model, blocks, policies.Sharding(activation_checkpointing=kind))
    ids = torch.randint(64, (2, 512), device=device)
    with torch.autocast(device, torch.bfloat16):
        model(ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])
expected = gradients("none")
for kind in ("none", "blocks", "selective"):
    error = (gradients(kind) - expected).norm() / expected.norm()
    print(f"| gradients of {kind} differ from those of none by {error:.2%}")
sys.exit(bool(error > 0.01))
'

phase_f() {  # gradients with dropout; the other tests for GPUs: Llama, kills, saves, four ranks
    run f-gradients 60 -c "$gradients"
    tests f-tests 150 tests/test_gpu.py -k "llama_fsdp or not script_resumes" -m "not slow"
    tests f-four-ranks 150 tests/test_ranks_on_one_gpu.py -k "not ($two_ranks)" \
        ${tiny:+-m "not slow"}
}

phase_g() {  # the largest batch of rank 0 of 2 in 24 GB, as in huggingface.co/blog/pytorch-fsdp
    local search="--ranks 2 --length 128 --precision fp32 --memory-limit-gb 24 --largest-batch --steps 1"
    local strategies=(full_shard shard_grad_op ddp) model tiny_model=tiny-gpt2
    # Offloaded shards are pinned, which needs a GPU.
    [ -n "$tiny" ] || strategies+=("full_shard --cpu-offload" "shard_grad_op --cpu-offload")
    for model in gpt2-xl gpt2-large; do
        memory "g-$model" 120 "$model" $search --strategies "${strategies[@]}"
    done
}

[ ! -d wheels ] || "$python" -m pip install --quiet --no-deps --no-index wheels/*.whl
build=0
if [[ " $phases " =~ " b "|" f " ]]; then  # both need it; meanwhile the GPU is used
    "$python" tests/gpu/staged.py >"$logs/build.txt" 2>&1 &
    build=$!
fi
for phase in $phases; do
    "phase_$phase"
done
rm -r "$logs"
exit 0 # OUT/summary.txt has the exit codes
