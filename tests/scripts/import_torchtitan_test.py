"""Runs scripts/import_torchtitan.py on a stand-in for TorchTitan, and has Tessera read the resulting files.
usage: import_torchtitan_test.py TESSERA"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "scripts" / "import_torchtitan.py"
TESSERA = sys.argv.pop(1)


def imported(config, *options):
    """Returns exit status, TOML and standard error."""
    command = [sys.executable, SCRIPT, "--module", "registry", "--config", config, *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HERE / "stub")})
    return done.returncode, done.stdout, done.stderr


def keys(toml):
    return [line for line in toml.splitlines() if line and not line.startswith("#")]


class ImportTorchTitan(unittest.TestCase):
    def tessera_takes(self, toml):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "imported.toml"
            path.write_text(toml)
            done = subprocess.run([TESSERA, "train", path, "--print-config"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in keys(toml):
            self.assertIn(line.split(" = ")[0], done.stdout)
        return done.stdout

    def test_whole_configuration(self):
        status, toml, error = imported("small", "--training.steps", "77")
        self.assertEqual((status, error), (0, ""))
        printed = self.tessera_takes(toml)
        for line in ("steps = 77", "lr = 0.00022", "beta2 = 0.95", "decay_ratio = -1.0", "total_steps = 0", "dim = 64",
                     "n_layers = 3", "n_dense_layers = 1", "inter_dim = 128", "moe_inter_dim = 32", "num_experts = 4",
                     "num_shared_experts = 2", "top_k = 2", 'attn_mask_type = "block_causal"', 'mode = "selective"',
                     "expert_parallel_degree = 8", 'dataset = "c4"', 'expert_parallel_comm_backend = "standard"'):
            self.assertIn(line, keys(toml))
            self.assertIn(line, printed)

    def test_yarn_applies_at_every_length(self):
        short, long = imported("small")[1], imported("small", "--training.seq_len", "8192")[1]
        for line in ("original_seq_len = 2048", "beta_fast = 16.0", "beta_slow = 0.5"):
            self.assertIn(line, keys(short))
        self.assertIn("above 2048 tokens", short)
        for line in ("original_seq_len = 4096", "beta_fast = 32.0", "beta_slow = 1.0"):
            self.assertIn(line, keys(long))

    def test_moments_and_weights_that_moved(self):
        _, toml, _ = imported("small", "--optimizer.implementation", "fused_opt_states_bf16",
                              "--checkpoint.initial_load_in_hf", "True", "--activation_checkpoint", "None",
                              "--parallelism.module_fqns_per_model_part", "[['tok_embeddings'], ['norm', 'lm_head']]")
        for line in ('state_dtype = "bfloat16"', 'initial_load_path = "./assets"', 'mode = "none"',
                     'module_fqns_per_model_part = [["tok_embeddings"], ["norm", "output"]]'):
            self.assertIn(line, keys(toml))

    def test_what_is_converted_becomes_what_is_left_out(self):
        status, toml, error = imported("mxfp8")
        self.assertEqual((status, error), (0, ""))
        self.assertIn('converters = ["quantize.linear.mx"]', keys(toml))
        shared = [f'"moe.shared_experts.w{i}"' for i in (1, 2, 3)]
        self.assertIn(f'filter_fqns = ["output", {", ".join(shared)}]', keys(toml))
        self.tessera_takes(toml)

    def test_backends(self):
        status, toml, _ = imported("hybridep")
        self.assertEqual(status, 0)
        self.assertIn('expert_parallel_comm_backend = "direct"', keys(toml))

    def test_nothing_is_dropped_silently(self):
        for config, options, what in (
                ("new_field", (), "training.from_tomorrow = 7"),
                ("new_policy", (), "activation_checkpoint is a MemoryBudgetAC"),
                ("other_epsilon", (), "model_spec.model.norm.eps = 1e-06: Tessera's model has 1e-05 there"),
                ("float8", (), "Float8LinearConverter"),
                ("small", ("--training.enable_cpu_offload", "True"), "training.enable_cpu_offload = True"),
                ("small", ("--override.imports", "['my.module']"), "override.imports = 'my.module'"),
                ("small", ("--parallelism", "7"), "parallelism = 7")):
            with self.subTest(config=config, options=options):
                status, toml, error = imported(config, *options)
                self.assertEqual(status, 2)
                self.assertIn("1 field was not imported", error)
                self.assertIn(what, "\n".join(line for line in toml.splitlines() if line.startswith("#   ")))
                self.assertEqual(imported(config, *options, "--allow-unknown")[0], 0)
                self.tessera_takes(toml)

    def test_errors(self):
        bare = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
        self.assertEqual(bare.returncode, 2)
        self.assertIn("--module and --config", bare.stderr)
        without = subprocess.run([sys.executable, SCRIPT, "--module", "registry", "--config", "small"],
                                 capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
        self.assertEqual(without.returncode, 1)
        self.assertIn("a Python that has TorchTitan 0.3", without.stderr)


if __name__ == "__main__":
    unittest.main()
