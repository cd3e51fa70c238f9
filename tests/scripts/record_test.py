"""Tests bench/record.py: figures of GPUs are those of their records, or are said to be old. Mutants fit their sources.
usage: record_test.py"""

import gzip
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
import gpu_mutants  # noqa: E402
import record  # noqa: E402

MACHINE = {"tessera": "0.1.0+abc", "driver": "580.1, for CUDA up to 13.0", "cuBLASLt": "13.1", "cuDNN": "9.19",
           "GPU 0": "NVIDIA H100 80GB HBM3, compute capability 9.0"}
PAGE = "# Speed\n\nOn an H100, 2 sizes:\n\n<!-- record first gemm -->\n<!-- end -->\n\nThe end.\n"


class Repository(unittest.TestCase):
    def test_figures_are_those_of_their_records(self):
        self.assertEqual(record.check(ROOT), [])

    def test_mutants_of_gpu_kernels_fit_the_sources(self):
        self.assertEqual(gpu_mutants.problems(), [])


class Record(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.write("src/ops/gemm/gemm_cuda.cu", "one\n")
        self.write("docs/performance.md", PAGE)
        rates = {("ours", "bf16 fwd"): 600.0, ("torch", "bf16 fwd"): 500.0, ("ours", "bf16 dgrad"): 400.0}
        self.record = {"machine": MACHINE, "torch": "2.11", "logs": [], "sources": self.sources(),
                       "lines": [{"side": side, "table": "gemm", "name": name, "shape": "8x8x8", "rate": rate}
                                 for (side, name), rate in rates.items()]}
        self.keep()
        self.assertEqual(record.write_docs(self.root), [])

    def sources(self):
        return record.hashes(self.root, record.SOURCES["gemm"])

    def keep(self):
        path = self.root / "bench/records/first.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(self.record).encode()))

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def page(self):
        return (self.root / "docs/performance.md").read_text()

    def fails(self, expected):
        problems = record.check(self.root)
        self.assertEqual(len(problems), 1, problems)
        self.assertIn(expected, problems[0])

    def test_figures_are_written_and_hold(self):
        self.assertIn("| 8x8x8 | 600, 1.20 | 400, - | -, - |", self.page())
        self.assertIn("NVIDIA H100 80GB HBM3, driver 580.1, cuBLASLt 13.1, cuDNN 9.19, PyTorch\n2.11; "
                      "Tessera 0.1.0+abc.", self.page())
        self.assertIn("(../bench/records/first.json.gz)", self.page())
        self.assertTrue(self.page().endswith("<!-- end -->\n\nThe end.\n"))
        self.assertNotIn("**Old**", self.page())
        self.assertEqual(record.check(self.root), [])

    def program(self, name, script):
        self.write(name, "#!/bin/sh\n" + script)
        (self.root / name).chmod(0o755)

    def test_suites_are_counted_and_a_failed_test_fails(self):
        tests = [{"result": "COMPLETED"}, {"result": "COMPLETED", "failures": [{}]}, {"result": "SKIPPED"}]
        results = json.dumps({"testsuites": [{"testsuite": tests}]})
        self.program("build/tests/ops/test_ops_cuda",
                     "for word; do case $word in --gtest_output=json:*)\n"
                     f"echo '{results}' > ${{word#*json:}};; esac; done; exit 1\n")
        self.program("build/src/app/tessera", "echo 'GPU 0: NVIDIA H100 80GB HBM3, and more'\n")
        arguments = ["record.py", "make", str(self.root / "build"), "--rounds", "0", "--suites"]
        with mock.patch.object(record, "ROOT", self.root):
            with mock.patch.object(sys, "argv", [*arguments, "ops,step"]), self.assertRaises(SystemExit) as end:
                record.main()
            self.assertIn("no test programs of step", end.exception.code)
            with mock.patch.object(sys, "argv", [*arguments, "ops"]), self.assertRaises(SystemExit) as end:
                record.main()
            self.assertEqual(end.exception.code, True)
        made, = (self.root / "bench/records").glob("*-h100.json.gz")
        self.assertEqual(record.suites(json.loads(gzip.decompress(made.read_bytes())))[2].rsplit("|", 2)[0],
                         "| `test_ops_cuda` | 1 | 1 | 1 ")

    def test_times_of_decoding_are_in_the_record(self):
        timed = [{"name": f"on_gpu/16B_8_layers/{texts}/iterations:400/real_time", "real_time": us} | rate
                 for texts, us, rate in ((1, 632.0, {"bytes_per_second": 2.51e12}), (8, 1558.0, {}))]
        self.program("build/bench/bench_generate", "for word; do case $word in --benchmark_out=*) cat > "
                     f"${{word#*=}} <<'END'\n{json.dumps({'benchmarks': timed})}\nEND\n;; esac; done\n")
        log, lines = record.run_decoding(self.root / "build")
        self.assertEqual(log["status"], 0)
        self.assertEqual(record.decoding(self.record | {"lines": lines})[2:],
                         ["| 1 | 0.632 | 1,582 | 2.51 |", "| 8 | 1.558 | 5,135 | - |"])

    def test_parts_of_several_gpus_are_in_the_record(self):
        def cell(name, tokens):
            ms = 701.0 if " 3 " in name else 700.0
            return {"name": name, "key": [4], "rows": [{"tokens_per_s_per_rank": tokens, "step_ms": ms, "mfu": 0.5,
                                                        "forward_ms": 0.25 * ms, "backward_ms": 0.5 * ms,
                                                        "loss_first": 12.02, "loss_last": 11.3}]}

        call = {"sms": 24, "payload": "bf16", "call": "dispatch", "microseconds": 638.0, "gb_per_s": 330.0,
                "gb_per_s_to_others": 247.5}
        measured = [cell("cells bf16 standard forced batch=2 recompute=none", 20000.0),
                    cell("cells bf16 direct forced batch=2 recompute=none", 25000.0),
                    cell("cells bf16 direct real batch=1 recompute=full", 15000.0),
                    cell("scaling 2 batch=2 recompute=none", 70000.0),
                    *(cell(f"layers mxfp8 256x256, output direct forced {depth} batch=2 recompute=none", 50000.0)
                      for depth in (1, 3)),
                    cell("layers bf16 direct forced 1 batch=2 recompute=none", 50000.0),
                    {"name": "dispatch 16B", "key": [], "rows": [call, call | {"call": "combine", "sms": 16}]}]
        (self.root / "bench").mkdir(exist_ok=True)
        script = self.root / "bench/gpus.py"  # writes the rows where --json says
        script.write_text("import sys\nopen(sys.argv[-1], 'w').write(" + repr("".join(
            json.dumps(each) + "\n" for each in measured)) + ")\n")
        with mock.patch.object(record, "ROOT", self.root):
            log, lines = record.run_gpus(self.root, "tessera", "cells,dispatch", 60)
        self.assertEqual((log["status"], log["rows"]), (0, 8))
        self.assertEqual(record.gpus_cells({"lines": lines})[2:], [
            "| `bf16`, `standard`, forced | batch=2 recompute=none | 20,000 | 700.0 | 50.0 | 1.000 | 12.020, 11.300 |",
            "| `bf16`, `direct`, forced | batch=2 recompute=none | 25,000 | 700.0 | 50.0 | 1.250 | 12.020, 11.300 |",
            "| `bf16`, `direct`, real | batch=1 recompute=full | 15,000 | 700.0 | 50.0 | - | 12.020, 11.300 |"])
        self.assertEqual(record.gpus_scaling({"lines": lines})[2:], ["| 2 | 70,000 | 700.0 | 50.0 |"])
        self.assertEqual(record.gpus_layers({"lines": lines})[2:],
                         ["| forced | `mxfp8 256x256, output` | `direct` | 0.1 | 0.2 | 0.5 |"])
        self.assertEqual(record.gpus_dispatch({"lines": lines}), [
            "| shape | payload | SMs | dispatch | combine |", "| --- | --- | --- | --- | --- |",
            "| 16B | bf16 | 24 | 638, 330 (248) |  |", "| 16B | bf16 | 16 |  | 638, 330 (248) |"])

    def test_both_backends_become_a_table(self):
        log = ("[15:35:35] warning no document fell to validation: there are only 1\n"
               "direct: loss 11.9381 to 2.6071, 60 of 60 steps have the bits of direct, the last 20 losses differ by "
               "+0.000 %, 0 later rounds\n"
               "direct, in rounds: loss 11.9381 to 2.6099, 0 of 60 steps have the bits of direct, the last 20 losses "
               "differ by +0.039 %, 420 later rounds\n")
        self.assertEqual(record.backends({"logs": [{"name": "gpu_backends.py", "log": log}]})[2:], [
            "| direct | 11.9381 | 2.6071 | 60 of 60 | +0.000 | 0 |",
            "| direct, in rounds | 11.9381 | 2.6099 | 0 of 60 | +0.039 | 420 |"])

    def test_faults_become_a_table(self):
        log = ("fsdp | killed | 6 | 5.8 s | rank 3 has died\nfsdp | nan | 1 | - | a gradient was NaN\n"
               "direct | stopped | MISSED: no second attempt\n")
        self.assertEqual(record.faults({"logs": [{"name": "gpu_faults.py", "log": log}]})[2:], [
            "| `fsdp` | killed | 6 | 5.8 s |", "| `fsdp` | nan | 1 | - |",
            "| `direct` | stopped | MISSED: no second attempt |"])

    def test_compared_losses_are_in_the_record(self):
        verdict = {"text": "equivalent (difference -0.06 % ± 0.13 %, margin 0.25 %)",
                   "difference_per_seed": [-0.0007, 0.00022]}
        side = {"label": "bf16", "final_loss": {"mean": 2.4059}, "validation_loss": None,
                "tokens_per_second": 44000.4, "peak_memory_bytes": 3 * 2**29}
        report = {"sides": [side, side | {"label": "mxfp8", "verdict": verdict, "validation_loss": {"mean": 2.5}}],
                  "runs": [{"side": label, "seed": 1, "folder": f"runs/{label}/seed-1", "program": "0.1.0+abc"}
                           for label in ("bf16", "mxfp8")]}
        self.program("tessera", 'test "$1 $2 $3 $4" = "compare bf16=a mxfp8=b c --out" || exit 1\n'
                     f"cat > ${{5%.html}}.json <<'END'\n{json.dumps(report)}\nEND\n")
        log, lines = record.run_comparison(self.root / "tessera", "0.1.0+abc", "bf16=a 'mxfp8=b c'")
        self.assertEqual(log["status"], 0)
        self.assertEqual(lines[1]["runs"], [{"side": "mxfp8", "seed": 1, "program": "0.1.0+abc"}])
        self.assertEqual(record.losses({"lines": lines})[2:], [
            "| `bf16` |  |  | 2.4059 | - | 44,000 | 1.5 GiB |",
            f"| `mxfp8` | {verdict['text']} | -0.070, +0.022 | 2.4059 | 2.5000 | 44,000 | 1.5 GiB |"])
        log, _ = record.run_comparison(self.root / "tessera", "0.1.0+def", "bf16=a 'mxfp8=b c'")
        self.assertEqual((log["status"], log["log"]), (1, "\nrecord: runs of another program: 0.1.0+abc\n"))
        self.assertEqual(record.run_comparison(self.root / "tessera", "0.1.0+abc", "bf16=a")[0]["status"], 1)

    def test_another_figure_fails(self):
        self.write("docs/performance.md", self.page().replace("600, 1.20", "700, 1.40"))
        self.fails("docs/performance.md:11: figures differ from their record; bench/record.py docs")

    def test_another_record_fails(self):
        self.record["lines"][0]["rate"] = 610.0
        self.keep()
        self.fails("figures differ")

    def test_changed_sources_make_figures_old(self):
        for change in ({"src/ops/gemm/gemm_cuda.cu": "two\n"}, {"src/ops/runtime/libraries.cc": "new\n"}):
            for name, text in change.items():
                self.write(name, text)
            self.fails("figures differ")
            self.assertEqual(record.write_docs(self.root), [])
            self.assertIn("**Old**: the sources have changed since.", self.page())
            self.assertEqual(record.check(self.root), [])
            self.record["sources"] = self.sources()
            self.keep()
            self.fails("figures differ")
            record.write_docs(self.root)
            self.assertNotIn("**Old**", self.page())

    def test_kernels_of_decoding_do_not_change_steps(self):
        kernels = {"src/ops/attention/mla_decode_cuda.cu", "src/ops/attention/rope_cuda.cu"}
        for kernel in kernels:
            self.write(kernel, "new\n")
        self.assertEqual(record.hashes(self.root, record.SOURCES["steps"]).keys() & kernels,
                         {"src/ops/attention/rope_cuda.cu"})
        self.assertEqual(record.hashes(self.root, record.SOURCES["suites"]).keys() & kernels, kernels)

    def test_other_sources_do_not(self):
        self.write("src/ops/attention/rope_cuda.cu", "new\n")
        self.assertEqual(record.check(self.root), [])

    def test_comments_and_layout_do_not(self):
        self.write("src/ops/gemm/gemm_cuda.cu", "// A product.\none  /* of two\nmatrices */\n")
        self.assertEqual(record.check(self.root), [])
        self.write("bench/gpu.py", "one = 1\n")
        self.record["sources"] = self.sources()
        self.keep()
        self.write("bench/gpu.py", '"""What it is."""\n\n# A number.\none = 1\n')
        self.assertEqual(record.check(self.root), [])
        self.write("src/ops/gemm/gemm_cuda.cu", 'one "// no comment"\n')
        self.fails("figures differ")

    def test_a_record_that_is_not_there_fails(self):
        (self.root / "bench/records/first.json.gz").unlink()
        self.fails("docs/performance.md:5: no record 'first' in bench/records")

    def test_a_block_without_an_end_fails(self):
        self.write("docs/performance.md", PAGE.replace("<!-- end -->", ""))
        self.fails("docs/performance.md:5: no '<!-- end -->'")

    def test_a_gpu_without_a_record_is_old(self):
        for text, problems in (("## Here\n\n700 TFLOP/s on an H200.\n", 1),
                               ("## Here\n\n**Old**: no record. 700 TFLOP/s on an H200.\n", 0),
                               ("## Here\n\n**Old**: no record.\n\n### Below\n\n700 TFLOP/s on an H200.\n", 0),
                               ("## Here\n\n**Old**: no record.\n\n## Beside\n\n700 TFLOP/s on an H200.\n", 1),
                               ("## Here\n\n700 GFLOP/s on a CPU.\n", 0)):
            self.write("docs/results.md", "# Results\n\n" + text)
            self.assertEqual(len(record.check(self.root)), problems, text)


if __name__ == "__main__":
    unittest.main()
