#!/usr/bin/env python3
"""Checks the recipes: every variant loads and fits, and every script passes options that exist.

    recipes_test.py TESSERA
"""
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
SLURM = os.path.join(ROOT, "recipes", "slurm")
TESSERA = sys.argv[1]
RANKS = {"16b": 8, "671b": 256}
VARIANTS = list(itertools.product(RANKS, ("bf16", "mxfp8"), ("standard", "direct")))


def run(*words, **options):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def options_of(*command):
    """Returns the options that a command's help lists."""
    return set(re.findall(r"--[\w-]+", run(TESSERA, *command, "--help").stdout))


def variant(*words):
    return run(os.path.join(ROOT, "recipes", "variant.sh"), *words)


class Recipes(unittest.TestCase):
    def test_every_variant_loads_and_is_planned(self):
        """Plans on CPUs, for which every build can plan. tests/app/configs_test.cc checks how much a GPU takes."""
        for model, precision, exchange in VARIANTS:
            with self.subTest(f"{model} {precision} {exchange}"):
                arguments = variant(model, precision, exchange)
                self.assertEqual(arguments.returncode, 0, arguments.stdout)
                planned = run(TESSERA, "plan", "memory", *arguments.stdout.split(), "--training.device=cpu",
                              "--ranks", str(RANKS[model]), "--available", "10000")
                self.assertEqual(planned.returncode, 0, planned.stdout)
                self.assertRegex(planned.stdout, r"GiB")

    def test_unknown_variants_are_refused_by_name(self):
        for words in (("7b", "bf16", "direct"), ("16b", "int4", "direct"), ("16b", "bf16", "pigeon"), ("16b", "bf16", "direct", "x")):
            refused = variant(*words)
            self.assertEqual(refused.returncode, 2)
            self.assertRegex(refused.stdout, "unknown .*'(7b|int4|pigeon|x)'; expected")

    def test_jobs_call_the_launcher_with_options_that_exist(self):
        """Runs the jobs with a program in tessera's place that prints its arguments."""
        for model, precision, exchange in VARIANTS:
            with self.subTest(f"{model} {precision} {exchange}"), tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, "tessera"), "w") as file:
                    file.write("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
                os.chmod(os.path.join(folder, "tessera"), 0o755)
                # Only root can raise a limit on locked memory.
                job = os.path.join(folder, "job")
                with open(os.path.join(SLURM, f"{model}.sbatch")) as file, open(job, "w") as copy:
                    copy.write(file.read().replace("ulimit -l unlimited", "true"))
                called = run("bash", job, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": ROOT,
                                               "PRECISION": precision, "EXCHANGE": exchange})
                self.assertEqual(called.returncode, 0, called.stdout)
                launch, train = called.stdout.split("\n--\n")
                known = options_of("launch")
                for option in re.findall(r"^--[\w-]+", launch, re.M):
                    self.assertIn(option, known)
                shown = run(TESSERA, *train.split(), "--print-config")
                self.assertEqual(shown.returncode, 0, shown.stdout)
                self.assertIn("memory_interval = 20", shown.stdout)
                options = dict(zip(*[iter(launch.split()[1:])] * 2))
                with open(job) as file:
                    most = re.search(r"^#SBATCH --nodes=(?:\d+-)?(\d+)", file.read(), re.M).group(1)
                self.assertEqual(int(options["--nodes"]) + int(options["--spares"]), int(most))
                self.assertEqual(int(options["--nodes"]) * int(options["--ranks-per-node"]), RANKS[model])

    def test_jobs_are_told_to_save_before_their_time_is_over(self):
        for model in RANKS:
            with open(os.path.join(SLURM, f"{model}.sbatch")) as file:
                self.assertRegex(file.read(), r"(?m)^#SBATCH --signal=B:TERM@1800 ")

    def test_metrics_can_be_scraped_from_another_machine(self):
        for variables, address in (({}, "0.0.0.0"), ({"PROMETHEUS": "127.0.0.1"}, "127.0.0.1")):
            with tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, "tessera"), "w") as file:
                    file.write("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
                os.chmod(os.path.join(folder, "tessera"), 0o755)
                called = run(os.path.join(ROOT, "recipes", "train.sh"), "16b", "1", "0", "dataset", "dump", "eth0",
                             env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables})
            launch, train = called.stdout.split("\n--\n")
            self.assertIn(f"--prometheus-address\n{address}:9401", launch)
            shown = run(TESSERA, *train.split(), "--print-config").stdout
            self.assertIn("prometheus_port = 9400", shown)
            self.assertRegex(shown, f"prometheus_address = [\"']{address}[\"']")

    def test_a_job_of_an_unknown_variant_starts_nothing(self):
        refused = run(os.path.join(ROOT, "recipes", "train.sh"), "16b", "1", "0", "dataset", "dump", "eth0",
                      env={**os.environ, "PRECISION": "int4"})
        self.assertEqual(refused.returncode, 2, refused.stdout)
        self.assertIn("unknown precision 'int4'", refused.stdout)

    def test_programs_for_slurm_use_options_that_exist(self):
        for name in ("tessera_health.sh", "tessera_prolog.sh"):
            with open(os.path.join(SLURM, name)) as file:
                words = re.search(r'exec "\$program" (health \w+)(.*)', file.read(), re.S)
            known = options_of(*words.group(1).split())
            for option in re.findall(r"--[\w-]+", words.group(2)):
                self.assertIn(option, known)

    def test_programs_for_slurm_read_their_settings_from_a_file(self):
        """Slurm passes them none of the variables that slurmd has."""
        for name, option in (("tessera_health.sh", "--max-drained 7"), ("tessera_prolog.sh", "--rates /shared/rates")):
            with tempfile.TemporaryDirectory() as folder:
                settings, script = os.path.join(folder, "settings"), os.path.join(folder, name)
                with open(os.path.join(SLURM, name)) as file, open(script, "w") as copy:
                    copy.write(file.read().replace("/etc/default/tessera", settings))
                with open(os.path.join(folder, "tessera.sh"), "w") as file:
                    file.write('#!/bin/sh\necho "$@"\n')
                os.chmod(os.path.join(folder, "tessera.sh"), 0o755)
                without = run("bash", script, env={})
                self.assertEqual(without.returncode, 0, without.stdout)
                self.assertNotIn(option, without.stdout)
                with open(settings, "w") as file:
                    file.write("TESSERA_MAX_DRAINED=7\nTESSERA_RATES=/shared/rates\n")
                self.assertIn(option, run("bash", script, env={}).stdout)

    def test_the_files_for_slurm_set_no_key_twice(self):
        """Of several lines with a key Slurm takes the last, without a word."""
        keys = []
        for name in ("slurm.conf", "slurm_cloud.conf"):
            with open(os.path.join(SLURM, name)) as file:
                keys += re.findall(r"^(\w+)=", file.read(), re.M)
        self.assertEqual(sorted(keys), sorted(set(keys)))
        with open(os.path.join(SLURM, "slurm_cloud.conf")) as file:
            self.assertIn("permit_job_expansion", file.read())

    def test_only_cloud_nodes_are_ended_when_they_are_idle(self):
        """tests/cluster tests with Slurm that a partition's SuspendTime ends its nodes, and no others."""
        with open(os.path.join(SLURM, "slurm_cloud.conf")) as file:
            lines = [line.split() for line in file if not line.startswith("#")]
        timed = [words[0] for words in lines for word in words if word.startswith("SuspendTime=")]
        self.assertEqual(timed, ["PartitionName=cloud"])

    def test_scripts_are_sound(self):
        scripts = [path for suffix in ("sh", "sbatch")
                   for path in glob.glob(os.path.join(ROOT, "recipes", "**", f"*.{suffix}"), recursive=True)]
        self.assertGreater(len(scripts), 8)
        for path in scripts:
            self.assertEqual(run("bash", "-n", path).stdout, "")
            if shutil.which("shellcheck"):
                self.assertEqual(run("shellcheck", path).stdout, "")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
