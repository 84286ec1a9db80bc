"""vLLM end to end, with our attention and with TRITON_ATTN: whether greedy tokens are equal, and tokens a second.

`python -m benchmarks.vllm_serving [--only PART ...] [--model NAME ...] [--tensor-parallel N] [--compiled] [--out FILE]`

Parts: `equal` (over 200 prompts of random lengths, in several modes), `serve` (`vllm serve` and the OpenAI client),
`speed` (one shape, three workloads, with graphs) and `fp8` (our 8-bit cache beside our fp16 one).
Needs vLLM and a GPU, and no network: models have random weights.
Each engine is a process of its own; ours counts the GPU as 7.5, so that vLLM chooses it by itself. Exit code 1 if
tokens differ by more than a tie, or if our kernels were not used.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS, NEW_TOKENS, VOCABULARY = 208, 12, 2048
# Two tokens whose log probabilities are this close count as a tie: logits are fp16 or bf16 numbers of up to about 4.
TIES = {"float16": 0.03, "bfloat16": 0.15}

# Models with the heads of real ones, but few layers and channels. Windows and softcaps are so small that they matter in
# short prompts.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dict(
        model_type="qwen3", hidden_size=1024, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=4096, dtype="float16",
    ),
    "gemma2": dict(
        model_type="gemma2", hidden_size=1024, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, sliding_window=100, attn_logit_softcapping=3.0,
        max_position_embeddings=4096, dtype="bfloat16",  # vLLM refuses float16 for it
    ),
    "bloom": dict(model_type="bloom", hidden_size=1024, n_layer=4, n_head=16, dtype="float16"),
}  # fmt: skip
QWEN3_0_6B = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024, intermediate_size=3072,
    num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000, tie_word_embeddings=True,
    torch_dtype="float16", hidden_act="silu", attention_bias=False, bos_token_id=1, eos_token_id=2,
    use_sliding_window=False, max_window_layers=28, initializer_range=0.02,
)  # fmt: skip
# Three settings with two values each. For any two settings, all four combinations of their values occur.
OURS = {
    "graphs, prefix caching, chunks": dict(eager=False, prefix_caching=True, chunk=256),
    "eager, no prefix caching, chunks": dict(eager=True, prefix_caching=False, chunk=256),
    "graphs, no prefix caching, whole": dict(eager=False, prefix_caching=False, chunk=8192),
    "eager, prefix caching, whole": dict(eager=True, prefix_caching=True, chunk=8192),
}
REFERENCE = dict(eager=False, prefix_caching=True, chunk=8192, backend="TRITON_ATTN")
# The least ratio of our speed to vLLM's, by workload.
WORKLOADS = {"32 mixed prompts": 1.2, "a prompt of 8,000": 1.5, "one prompt decoding": 1.0}


# ---- models that need no network -------------------------------------------------------------------------------------


def write_model(name: str, folder: Path) -> Path:
    """Write a checkpoint with random weights and a tokenizer of whole words; returns its folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.04)
    config = AutoConfig.for_model(**MODELS[name] | special)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, MODELS[name]["dtype"]))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", bos_token="w1").save_pretrained(folder)
    return folder


def write_shapes(folder: Path) -> Path:
    """Write a model without weights, in the shapes of Qwen3-0.6B; returns its folder."""
    model = folder / "qwen3-0.6b"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(QWEN3_0_6B))
    return model


def random_prompts() -> list[list[int]]:
    """Return prompts of 1 to 700 tokens; every other prompt starts with the same 96 tokens."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return [int(token) for token in torch.randint(3, VOCABULARY, (count,), generator=generator)]

    shared = draw(96)
    lengths = torch.randint(1, 600, (PROMPTS,), generator=generator)
    return [(shared if index % 2 else []) + draw(int(count)) for index, count in enumerate(lengths)]


# ---- one engine, in a process of its own -----------------------------------------------------------------------------


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Run one engine over a job's prompts; returns tokens, log probabilities and seconds by workload."""
    import torch
    from vllm import LLM, SamplingParams

    graphs: dict[str, Any] = {} if job["compiled"] else {"mode": 0}
    if not job["eager"]:
        mode = {} if job["compiled"] else {"cudagraph_mode": "FULL_DECODE_ONLY"}
        graphs |= mode | {"cudagraph_capture_sizes": job["sizes"]}
    started = time.time()
    llm = LLM(
        model=job["model"], load_format=job["load_format"], skip_tokenizer_init=job["load_format"] == "dummy",
        dtype=job["dtype"], enforce_eager=job["eager"], max_model_len=job["max_model_len"], max_num_seqs=64, seed=0,
        attention_backend=job.get("backend"), enable_prefix_caching=job["prefix_caching"], compilation_config=graphs,
        max_num_batched_tokens=job["chunk"], gpu_memory_utilization=job["memory"], disable_log_stats=True,
        kv_cache_memory_bytes=job["cache"], tensor_parallel_size=job["tensor_parallel"],
        kv_cache_dtype=job.get("kv_cache_dtype", "auto"),
    )  # fmt: skip
    pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    found: dict[str, Any] = {"start_s": round(time.time() - started, 1), "pages": pages, "workloads": {}}
    for name, work in job["workloads"].items():
        sampling = SamplingParams(
            temperature=0.0, max_tokens=work["new_tokens"], ignore_eos=True, detokenize=False, logprobs=work["logprobs"]
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        seconds = []
        for _ in range(work["runs"]):
            torch.cuda.synchronize()
            begin = time.time()
            answers = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
            torch.cuda.synchronize()
            seconds.append(round(time.time() - begin, 4))
        result: dict[str, Any] = {"seconds": seconds, "tokens": [[*answer.token_ids] for answer in answers]}
        if work["logprobs"]:
            result["logprobs"] = [
                [{token: entry.logprob for token, entry in step.items()} for step in answer.logprobs]
                for answer in answers
            ]
        found["workloads"][name] = result
    from flash_attn_compat import backend_counts

    found["served"] = backend_counts()
    return found


def start_engine(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run ``run_engine`` in a child process; returns its result, or the end of its output under "error"."""
    name = job["name"].replace(" ", "_").replace(",", "").replace("/", "_")
    given, result, log = (folder / f"{name}.{kind}" for kind in ("job", "json", "log"))
    given.write_text(json.dumps(job | {"result": str(result)}))
    with log.open("w") as output:
        command = [sys.executable, "-m", "benchmarks.vllm_serving", "--engine", str(given)]
        try:
            given_to = dict(env=environment(job, folder), stdout=output, stderr=output, cwd=ROOT)
            code = subprocess.run(command, check=False, timeout=300, **given_to).returncode  # type: ignore[call-overload]
        except subprocess.TimeoutExpired:
            code = -1
    if code or not result.exists():
        return {"error": f"exit code {code}: {log.read_text()[-3000:]}"}
    found: dict[str, Any] = json.loads(result.read_text())
    found["log"] = [line for line in log.read_text().splitlines() if "flash_attn_compat" in line][:3]
    return found


def environment(job: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return a child's environment. Our engines treat the GPU as 7.5 and find our entry point by PYTHONPATH."""
    paths = [str(folder / "entry_point"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = os.environ | dict(
        PYTHONPATH=os.pathsep.join(paths), VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(job.get("tensor_parallel", 1) > 1)), VLLM_LOGGING_LEVEL="INFO",
        TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    found.pop("FLASH_ATTN_COMPAT_CAPABILITY", None)
    return found if job.get("backend") else found | {"FLASH_ATTN_COMPAT_CAPABILITY": "7.5"} | job.get("variables", {})


def write_entry_point(folder: Path) -> None:
    """Write the metadata of an installed package if this one is not installed: vLLM finds plugins by metadata alone."""
    from importlib.metadata import entry_points

    if any(point.name == "flash_attn_compat" for point in entry_points(group="vllm.general_plugins")):
        return
    info = folder / "entry_point/flash_attn_compat-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-compat\nVersion: 0\n")
    plugin = "flash_attn_compat = flash_attn_compat.vllm.plugin:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin}\n")


# ---- the parts -------------------------------------------------------------------------------------------------------


def compare(ours: dict[str, Any], theirs: dict[str, Any], tie: float) -> dict[str, Any]:
    """Compare greedy tokens up to the first difference of each answer, since all later tokens differ by it.

    Returns how many answers are equal, differ at a tie, or differ otherwise; and the largest difference of a log
    probability before the first different token.
    """
    found: dict[str, Any] = {"equal": 0, "ties": 0, "differences": 0, "widest": 0.0, "first": []}
    for index, (a, b) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        step = next((step for step, (x, y) in enumerate(zip(a, b)) if x != y), None)
        p, q = ours["logprobs"][index], theirs["logprobs"][index]
        before = [
            abs(p[place][str(a[place])] - q[place][str(a[place])]) for place in range(len(a) if step is None else step)
        ]
        found["widest"] = max(found["widest"], *before, 0.0)
        if step is None:
            found["equal"] += 1
            continue
        gap = max(abs(at.get(str(a[step]), -99.0) - at.get(str(b[step]), -99.0)) for at in (p[step], q[step]))
        found["ties" if gap <= tie else "differences"] += 1
        if gap > tie:
            found["first"] = [*found["first"], {"prompt": index, "step": step, "gap": gap}][:5]
    return found


def equal_part(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """For each model, run our engine in each mode and one with TRITON_ATTN at once, and compare their greedy tokens."""
    work = {"prompts": random_prompts(), "new_tokens": NEW_TOKENS, "logprobs": 5, "runs": 1}
    found: dict[str, Any] = {}
    for name in given.model:
        model, dtype = write_model(name, folder / name), MODELS[name]["dtype"]
        common = dict(
            model=str(model), load_format="auto", dtype=dtype, max_model_len=1024, sizes=[1, 2, 4, 8, 16, 32, 64],
            memory=0.15, cache=2**30, workloads={"greedy": work}, tensor_parallel=given.tensor_parallel,
            compiled=given.compiled,
        )  # fmt: skip
        jobs = {mode: common | options | {"name": f"{name} {mode}"} for mode, options in OURS.items()}
        jobs["TRITON_ATTN"] = common | REFERENCE | {"name": f"{name} TRITON_ATTN"}
        with ThreadPoolExecutor(len(jobs)) as pool:
            results = dict(zip(jobs, pool.map(lambda job: start_engine(job, folder), jobs.values()), strict=True))
        theirs = results.pop("TRITON_ATTN")
        found[name] = {"TRITON_ATTN": {key: theirs.get(key) for key in ("start_s", "error") if key in theirs}}
        for mode, ours in results.items():
            said = {key: ours[key] for key in ("error", "served", "start_s", "log") if key in ours}
            if "error" not in ours and "error" not in theirs:
                said |= compare(ours["workloads"]["greedy"], theirs["workloads"]["greedy"], TIES[dtype])
            said["ok"] = said.get("differences") == 0 and was_used(ours, given.tensor_parallel)
            found[name][mode] = said
            print(f"equal  {name:8} {mode:34} {json.dumps(said)[:400]}", flush=True)
        if "error" in theirs:
            print(f"equal  {name:8} TRITON_ATTN failed: {theirs['error'][-1500:]}", flush=True)
    return found


def was_used(ours: dict[str, Any], tensor_parallel: int) -> bool:
    """Whether our kernels served. With tensor parallelism the workers' log tells, since they are other processes."""
    if tensor_parallel > 1:
        return any("Attention runs on flash_attn_compat" in line for line in ours.get("log", ()))
    return bool(ours.get("served", {}).get("fused")) and set(ours["served"]) == {"fused"}


def speed_part(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure tokens a second in Qwen3-0.6B's shapes, with CUDA graphs, prefills included."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def prompt(count: int) -> list[int]:
        return [int(token) for token in torch.randint(10, 150000, (count,), generator=generator)]

    lengths = torch.randint(16, 1500, (32,), generator=generator)
    prompts = [[prompt(int(count)) for count in lengths], [prompt(8000)], [prompt(512)]]
    new_tokens = 64, 64, 256
    workloads = {
        name: {"prompts": given, "new_tokens": count, "logprobs": None, "runs": 3}
        for name, given, count in zip(WORKLOADS, prompts, new_tokens, strict=True)
    }
    common = dict(
        model=str(write_shapes(folder)), load_format="dummy", dtype="float16", max_model_len=8192,
        sizes=[1, 2, 4, 8, 16, 24, 32],
        memory=0.5, cache=8 * 2**30, workloads=workloads, eager=False, prefix_caching=False, chunk=8192,
        tensor_parallel=given.tensor_parallel, compiled=given.compiled,
    )  # fmt: skip
    ours = start_engine(common | {"name": "speed ours"}, folder)  # one after the other: they are timed
    theirs = start_engine(common | {"name": "speed TRITON_ATTN", "backend": "TRITON_ATTN"}, folder)
    found: dict[str, Any] = {"ok": was_used(ours, given.tensor_parallel)}
    for side, result in (("ours", ours), ("TRITON_ATTN", theirs)):
        if "error" in result:
            found |= {"ok": False, side: result["error"]}
            print(f"speed  {side} failed: {result['error'][-2000:]}", flush=True)
    if not found["ok"]:
        return found
    for (name, least), count in zip(WORKLOADS.items(), new_tokens, strict=True):
        times = [min(result["workloads"][name]["seconds"][1:]) for result in (ours, theirs)]
        total = count * len(workloads[name]["prompts"])
        rates = [round(total / seconds, 1) for seconds in times]
        same = ours["workloads"][name]["tokens"] == theirs["workloads"][name]["tokens"]
        ratio = round(times[1] / times[0], 3)
        found[name] = {"ours": rates[0], "TRITON_ATTN": rates[1], "ratio": ratio, "asked": least, "same tokens": same}
        print(f"speed  {name:20} {json.dumps(found[name])}", flush=True)
    return found


def fp8_part(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare greedy tokens over an 8-bit cache with PyTorch's over the dequantised cache, and measure its speed."""
    import torch

    model = write_model("qwen3", folder / "qwen3")
    work = {"prompts": random_prompts()[:64], "new_tokens": NEW_TOKENS, "logprobs": 5, "runs": 1}
    common = dict(
        model=str(model), load_format="auto", dtype="float16", max_model_len=1024, sizes=[1, 2, 4, 8, 16, 32, 64],
        memory=0.15, cache=2**30, workloads={"greedy": work}, tensor_parallel=1, compiled=False, kv_cache_dtype="fp8",
    )  # fmt: skip
    ours = common | REFERENCE | {"name": "fp8 ours", "backend": None}
    plain = {"name": "fp8 by chunked", "eager": True, "variables": {"FLASH_ATTN_COMPAT_BACKEND": "chunked"}}
    jobs = ours, ours | plain, ours | {"name": "fp16", "kv_cache_dtype": "auto"}
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = [*pool.map(lambda job: start_engine(job, folder), jobs)]
    for result in results:
        if "error" in result:
            print(f"fp8    failed: {result['error'][-2000:]}", flush=True)
            return {"ok": False, "error": result["error"]}
    found: dict[str, Any] = compare(*[result["workloads"]["greedy"] for result in results[:2]], TIES["float16"])
    found["served"] = [result["served"] for result in results]
    found["pages"] = {"8 bits": results[0]["pages"], "16 bits": results[2]["pages"]}
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(10, 150000, (32, 8000), generator=generator).tolist()
    works = {
        f"{count} new tokens": {"prompts": prompts, "new_tokens": count, "logprobs": None, "runs": 2}
        for count in (1, 256)
    }
    big = common | REFERENCE | dict(
        model=str(write_shapes(folder)), load_format="dummy", max_model_len=8704, sizes=[1, 2, 4, 8, 16, 24, 32],
        memory=0.5, cache=16 * 2**30, workloads=works, prefix_caching=False, backend=None,
    )  # fmt: skip
    both = [
        start_engine(big | {"name": f"fp8 speed {dtype}", "kv_cache_dtype": dtype}, folder) for dtype in ("auto", "fp8")
    ]
    for name in works:
        seconds = [min(result["workloads"][name]["seconds"][1:]) if "workloads" in result else 0.0 for result in both]
        found[name] = {"16 bits, s": seconds[0], "8 bits, s": seconds[1], "ratio": seconds[0] / max(seconds[1], 1e-9)}
    found["errors"] = [result["error"][-2000:] for result in both if "error" in result]
    found["ok"] = not found["differences"] and not found["errors"] and was_used(results[0], 1)
    print(f"fp8    {json.dumps(found)[:2500]}", flush=True)
    return found


def serve_part(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run `vllm serve` with default options except sizes; compare its answers over HTTP with TRITON_ATTN's."""
    model = folder / "qwen3"
    if not (model / "config.json").exists():
        write_model("qwen3", model)
    prompts = random_prompts()[:24]
    work = {"prompts": prompts, "new_tokens": NEW_TOKENS, "logprobs": 5, "runs": 1}
    reference = dict(
        name="serve TRITON_ATTN", model=str(model), load_format="auto", dtype="float16", max_model_len=1024, sizes=[1],
        memory=0.15, cache=2**30, workloads={"greedy": work}, tensor_parallel=1,
        compiled=False,
    ) | REFERENCE  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(start_engine, reference, folder)
        served = serve(model, prompts, given, folder)
        theirs = waiting.result()
    if "error" in served or "error" in theirs:
        found: dict[str, Any] = {"ok": False, "error": served.get("error") or theirs["error"]}
    else:
        found = compare(served["greedy"], theirs["workloads"]["greedy"], TIES["float16"]) | {"log": served["log"]}
        found["ok"] = not found["differences"] and bool(served["log"])
    print(f"serve  {json.dumps(found)[-2500:]}", flush=True)
    return found


def serve(model: Path, prompts: list[list[int]], given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "serve.log"
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port",
        str(port), "--dtype", "half", "--max-model-len", "1024", "--gpu-memory-utilization", "0.15",
        "--kv-cache-memory-bytes", str(2**30), "--served-model-name", "m", "--max-logprobs", "5",
        "--tensor-parallel-size", str(given.tensor_parallel),
    ]  # fmt: skip
    if not given.compiled:
        command += ["--compilation-config", json.dumps(graphs)]
    with log.open("w") as output:
        variables = environment({"tensor_parallel": 2}, folder)  # the server's engine is another process
        server = subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=folder)
    try:
        if not _answers(f"http://127.0.0.1:{port}/health", server):
            return {"error": f"the server did not start: {log.read_text()[-3000:]}"}
        import openai

        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

        def ask(prompt: list[int]) -> tuple[list[int], list[dict[str, float]]]:
            choice = client.completions.create(
                model="m", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0.0, logprobs=5,
                extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
            ).choices[0]  # fmt: skip
            names = choice.logprobs.tokens
            tops = [{_token_id(name): p for name, p in top.items()} for top in choice.logprobs.top_logprobs]
            return [int(_token_id(name)) for name in names], tops

        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(ask, prompts)]
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
    lines = [line for line in log.read_text().splitlines() if "Attention runs on flash_attn_compat" in line]
    return {"greedy": dict(zip(("tokens", "logprobs"), map(list, zip(*answers)), strict=True)), "log": lines[:2]}


def _token_id(name: str) -> str:
    """Return the number in a name such as "token_id:12"."""
    return name.rpartition(":")[2]


def _answers(url: str, server: subprocess.Popen[bytes], limit_s: float = 150.0) -> bool:
    """Whether the server answers before it ends or the time is over."""
    end = time.time() + limit_s
    while time.time() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


PARTS = {"equal": equal_part, "serve": serve_part, "speed": speed_part, "fp8": fp8_part}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_serving", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=[*PARTS])
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=[*MODELS], help="of the part `equal`")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share each model")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile models, as it does by default")
    parser.add_argument("--out", type=Path, help="write results there, as JSON")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed here: pip install vllm")
    if given.engine:
        job = json.loads(given.engine.read_text())
        Path(job["result"]).write_text(json.dumps(run_engine(job)))
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_entry_point(folder)
        for part in given.only:
            begin = time.time()
            found[part] = PARTS[part](given, folder)
            print(f"{part} took {time.time() - begin:.0f} s", flush=True)
            if given.out:
                given.out.write_text(json.dumps(found, indent=1))
    verdicts = [found[part]["ok"] for part in found if part != "equal"]
    verdicts += [mode["ok"] for model in found.get("equal", {}).values() for mode in model.values() if "ok" in mode]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
