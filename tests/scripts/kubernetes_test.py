#!/usr/bin/env python3
"""Checks that Kubernetes, JobSet and the MPI operator take the documents of recipes/kubernetes, as far as schemas tell.

    kubernetes_test.py TESSERA
`scripts/setup.sh kubernetes` fetches the validators into build/kubernetes.
"""
import copy
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from free_port import free_port

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
RECIPES = os.path.join(ROOT, "recipes", "kubernetes")
TESSERA = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(ROOT, "build", "kubernetes"))
try:
    import jsonschema
    import kubernetes_validate
    import yaml
except ImportError as error:
    print(f"skipped: {error}; scripts/setup.sh kubernetes fetches it")
    sys.exit(77)

VERSION = "1.33"  # version of Kubernetes
WORKERS = {"16b": 1, "671b": 34}
with open(os.path.join(ROOT, "tests", "scripts", "kubernetes_schemas.json")) as schemas_file:
    SCHEMAS = json.load(schemas_file)


def run(*words, **options):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def render(*words):
    printed = run(os.path.join(RECIPES, "render.sh"), *words)
    assert printed.returncode == 0, printed.stdout
    return list(yaml.safe_load_all(printed.stdout))


def validate(document):
    """Throws if a field is unknown, is missing or has the wrong type."""
    kind = document["kind"]
    if kind not in SCHEMAS:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    jsonschema.validate(document, SCHEMAS[kind])
    if kind == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]})
    else:
        for name, replica in document["spec"]["mpiReplicaSpecs"].items():
            validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}, **replica["template"]})


def templates(document):
    """Returns {"launcher": the template of its pod, "worker": ...}."""
    if document["kind"] == "JobSet":
        return {job["name"]: job["template"]["spec"]["template"] for job in document["spec"]["replicatedJobs"]}
    return {name.lower(): replica["template"] for name, replica in document["spec"]["mpiReplicaSpecs"].items()}


def pods(document):
    """Returns {"launcher": its pod's spec, "worker": ...}."""
    return {name: template["spec"] for name, template in templates(document).items()}


def each():
    """Yields every kind of job with every model, and the documents of the job."""
    for kind in ("jobset", "mpijob"):
        for model in WORKERS:
            yield kind, model, render(kind, model)


class Kubernetes(unittest.TestCase):
    def test_every_document_is_valid(self):
        for kind, model, documents in each():
            with self.subTest(f"{kind} {model}"):
                for document in documents:
                    validate(document)
        for document in render("health"):
            validate(document)

    def test_mistakes_are_found(self):
        """Shows that the validation can fail: each of these is one mistake."""
        job_set, mpi_job, daemon = render("jobset", "16b")[0], render("mpijob", "16b")[0], render("health")[0]

        def mistake(document, change):
            document = copy.deepcopy(document)
            change(document)
            with self.assertRaises(Exception):
                validate(document)
        mistake(job_set, lambda it: it["spec"]["successPolicy"].update(operator="Al"))
        mistake(job_set, lambda it: it["spec"].update(replicas=2))
        mistake(job_set, lambda it: pods(it)["worker"]["containers"][0].update(imagePullPolcy="Always"))
        mistake(mpi_job, lambda it: it["spec"].update(slots=8))
        mistake(mpi_job, lambda it: pods(it)["launcher"]["containers"][0].update(args="16b"))
        mistake(daemon, lambda it: it["spec"]["template"]["spec"].update(hostNetwork="yes"))

    def test_volumes_and_ports_that_are_used_exist(self):
        for kind, model, documents in each():
            with self.subTest(f"{kind} {model}"):
                for pod in pods(documents[0]).values():
                    volumes = {volume["name"] for volume in pod["volumes"]}
                    for container in pod["containers"]:
                        self.assertLessEqual({mount["name"] for mount in container["volumeMounts"]}, volumes)
                        probed = container.get("readinessProbe", {}).get("tcpSocket", {}).get("port")
                        self.assertIn(probed, [None, *(port["name"] for port in container["ports"])])

    def test_a_monitor_knows_the_name_that_its_nodes_daemon_uses(self):
        """Starts the worker's SSH server as a user, on another port and with a key of its own."""
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if not sshd or not shutil.which("ssh"):
            self.skipTest("there is no sshd or no ssh")
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # sshd wants it of root
        daemon = render("health")[0]["spec"]["template"]["spec"]["containers"][0]
        name_of_daemon = daemon["args"][daemon["args"].index("--node") + 1]
        source_of_daemon = next(it["valueFrom"] for it in daemon["env"] if f"$({it['name']})" == name_of_daemon)
        for kind, model, documents in each():
            with self.subTest(f"{kind} {model}"):
                worker = pods(documents[0])["worker"]["containers"][0]
                node = next(it for it in worker["env"] if it["valueFrom"] == source_of_daemon)
                with tempfile.TemporaryDirectory() as folder:
                    key, port = os.path.join(folder, "key"), free_port()
                    self.assertEqual(run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).stdout, "")
                    with open(os.path.join(folder, "sshd_config"), "w") as file:
                        file.write(f"Port {port}\nListenAddress 127.0.0.1\nHostKey {key}\nAuthorizedKeysFile {key}.pub\n"
                                   "StrictModes no\nUsePAM no\nPidFile none\n")
                    # What Kubernetes puts in.
                    words = [word.replace(f"$({node['name']})", "gpu-7").replace("/etc/tessera", folder)
                             for word in worker["command"]]
                    server = subprocess.Popen([sshd, *words[1:]], stderr=subprocess.PIPE, text=True)
                    try:
                        self.assertIn("listening", server.stderr.readline())
                        told = run("ssh", "-F", "/dev/null", "-p", str(port), "-i", key, "-oBatchMode=yes", "-oStrictHostKeyChecking=no",
                                   "-oUserKnownHostsFile=/dev/null", "127.0.0.1", "printenv", "TESSERA_HEALTH_NODE")
                    finally:
                        server.terminate()
                        server.communicate()
                self.assertEqual(told.stdout.splitlines()[-1], "gpu-7")

    def test_prometheus_is_told_the_ports_at_which_metrics_are_served(self):
        with tempfile.TemporaryDirectory() as folder:
            called = self.launch(folder, "w0 w1 w2").stdout
        served = {"launcher": re.search(r"--prometheus-address 0\.0\.0\.0:(\d+)", called).group(1),
                  "worker": re.search(r"--metrics\.prometheus_port=(\d+)", called).group(1)}
        for kind, model, documents in each():
            with self.subTest(f"{kind} {model}"):
                told = {name: template["metadata"]["annotations"] for name, template in templates(documents[0]).items()}
                self.assertEqual({name: it["prometheus.io/port"] for name, it in told.items()}, served)
                self.assertEqual({it["prometheus.io/scrape"] for it in told.values()}, {"true"})

    def test_spares_are_workers_that_the_launcher_counts(self):
        for kind, model, documents in each():
            with self.subTest(f"{kind} {model}"):
                arguments = pods(documents[0])["launcher"]["containers"][0]["args"]
                self.assertEqual(arguments[0], model)
                self.assertEqual(int(arguments[1]) + int(arguments[2]), WORKERS[model])
                if kind == "mpijob":
                    self.assertEqual(documents[0]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"], WORKERS[model])
                    continue
                worker = documents[0]["spec"]["replicatedJobs"][1]["template"]["spec"]
                self.assertEqual((worker["parallelism"], worker["completions"]), (WORKERS[model], WORKERS[model]))
                hosts = documents[1]["data"]["hostfile"].split()
                name, subdomain = documents[0]["metadata"]["name"], documents[0]["spec"]["network"]["subdomain"]
                self.assertEqual(hosts, [f"{name}-worker-0-{i}.{subdomain}" for i in range(WORKERS[model])])

    def test_names_reach_the_documents(self):
        with tempfile.TemporaryDirectory() as folder:
            names = os.path.join(folder, "names.env")
            with open(os.path.join(RECIPES, "names.env")) as file:
                lines = file.read()
            with open(names, "w") as file:
                file.write(lines.replace("NAMESPACE=default", "NAMESPACE=mine").replace("=bf16", "=mxfp8"))
            document = render("jobset", "671b", names)[0]
            self.assertEqual(document["metadata"]["namespace"], "mine")
            environment = {it["name"]: it.get("value") for it in pods(document)["launcher"]["containers"][0]["env"]}
            self.assertEqual(environment["PRECISION"], "mxfp8")
            with open(names, "w") as file:
                file.write(lines.replace("CLAIM=", "CLAIMED="))
            refused = run(os.path.join(RECIPES, "render.sh"), "jobset", "16b", names)
            self.assertEqual(refused.returncode, 2)
            self.assertIn("does not say CLAIM", refused.stdout)
        refused = run(os.path.join(RECIPES, "render.sh"), "jobset", "7b")
        self.assertEqual((refused.returncode, "unknown model '7b'" in refused.stdout), (2, True))

    def launch(self, folder, answering, **variables):
        """Runs launch.sh with 2 nodes and 1 spare among w0, w1 and w2. Programs take the place of ssh and tessera."""
        for name, text in (("ssh", f'for word in "$@"; do case " {answering} " in *" $word "*) exit 0 ;; esac; done; exit 255'),
                           ("tessera", 'printf "%s " "$@"')):
            with open(os.path.join(folder, name), "w") as file:
                file.write(f"#!/bin/bash\n{text}\n")
            os.chmod(os.path.join(folder, name), 0o755)
        with open(os.path.join(folder, "hosts"), "w") as file:
            file.write("w0 slots=8\nw1 slots=8\nw2 slots=8\n")
        return run(os.path.join(RECIPES, "launch.sh"), "16b", "2", "1", "/data", "/dump", "eth0",
                   env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOSTS": os.path.join(folder, "hosts"),
                        "ADDRESS": "10.0.0.1", "WAIT": "0", **variables})

    def test_the_launcher_trains_on_the_workers_that_answer(self):
        with tempfile.TemporaryDirectory() as folder:
            all_answer = self.launch(folder, "w0 w1 w2")
            self.assertIn("launch --nodes 2 --spares 1 --ranks-per-node 8", all_answer.stdout)
            self.assertIn("--hosts w0,w1,w2 --address 10.0.0.1 -- train", all_answer.stdout)
            no_spare = self.launch(folder, "w0 w2")
            self.assertIn("launch --nodes 2 --spares 0", no_spare.stdout)
            self.assertIn("--hosts w0,w2 ", no_spare.stdout)
            too_few = self.launch(folder, "w1")
            self.assertEqual(too_few.returncode, 1)
            self.assertIn("1 of 2 workers answer", too_few.stdout)
            no_workers = self.launch(folder, "w1", HOSTS=os.path.join(folder, "nothing"))
            self.assertEqual(no_workers.returncode, 2)
            self.assertIn("names 0 workers, and the run needs 2", no_workers.stdout)

    def test_a_launcher_that_waits_ends_when_it_is_told(self):
        with tempfile.TemporaryDirectory() as folder:
            self.launch(folder, "")  # leaves the programs there
            waiting = subprocess.Popen(
                [os.path.join(RECIPES, "launch.sh"), "16b", "2", "1", "/data", "/dump", "eth0"], stderr=subprocess.PIPE, text=True,
                env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOSTS": os.path.join(folder, "hosts")})
            self.assertIn("0 of 3 workers answer", waiting.stderr.readline())
            waiting.terminate()
            waiting.communicate(timeout=20)
            # A signal without a handler would give -15. It ends no process that is the first of its container.
            self.assertEqual(waiting.returncode, 143)

    def test_workers_outlive_a_launcher_that_is_lost(self):
        """Their memory has copies of the state."""
        for kind, model, documents in each():
            with self.subTest(f"{kind} {model}"):
                spec = documents[0]["spec"]
                if kind == "mpijob":
                    # The operator takes the replica's policy and not the pod's. With OnFailure a launcher that gives up would
                    # start again in its pod.
                    for name, replica in spec["mpiReplicaSpecs"].items():
                        self.assertEqual(replica["restartPolicy"], pods(documents[0])[name.lower()]["restartPolicy"])
                    continue
                self.assertNotIn("failurePolicy", spec)  # it acts on all jobs, the workers' too
                job = spec["replicatedJobs"][0]["template"]["spec"]
                self.assertGreater(job["backoffLimit"], 0)
                gives_up, loses_node = job["podFailurePolicy"]["rules"]
                self.assertEqual((gives_up["action"], gives_up["onExitCodes"]["values"]), ("FailJob", [2, 93]))
                self.assertEqual((loses_node["action"], loses_node["onPodConditions"][0]["type"]), ("Ignore", "DisruptionTarget"))

    def test_workers_stay_until_the_run_has_saved(self):
        for kind, model, documents in each():
            with self.subTest(f"{kind} {model}"):
                of = pods(documents[0])
                seconds = {pod["terminationGracePeriodSeconds"] for pod in of.values()}
                self.assertEqual(seconds, {1800})
                command = of["worker"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
                with tempfile.TemporaryDirectory() as folder:
                    os.makedirs(os.path.join(folder, "proc", "7"))
                    name = os.path.join(folder, "proc", "7", "comm")
                    with open(name, "w") as file:
                        file.write("tessera\n")
                    stopping = subprocess.Popen([word.replace("/proc", f"{folder}/proc") for word in command])
                    with self.assertRaises(subprocess.TimeoutExpired):
                        stopping.wait(1.5)
                    os.unlink(name)
                    self.assertEqual(stopping.wait(10), 0)

    def test_the_launcher_uses_options_that_exist(self):
        known = run(TESSERA, "launch", "--help").stdout
        self.assertIn("--hosts", known)
        self.assertIn("--address", known)
        arguments = render("health")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
        known = run(TESSERA, *arguments[:2], "--help").stdout
        for option in (word for word in arguments if word.startswith("--")):
            self.assertIn(option, known)

    def test_a_daemon_misses_a_gpu_that_a_worker_needs(self):
        arguments = render("health")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
        worker = pods(render("jobset", "671b")[0])["worker"]["containers"][0]
        self.assertEqual(arguments[arguments.index("--gpus") + 1], worker["resources"]["requests"]["nvidia.com/gpu"])

    def test_a_daemons_pod_has_room_for_an_active_check(self):
        """The check holds 64 MiB for each of 8 GPUs, and CUDA some hundreds."""
        daemon = render("health")[0]
        container = daemon["spec"]["template"]["spec"]["containers"][0]
        self.assertGreaterEqual(int(container["resources"]["limits"]["memory"].removesuffix("Gi")), 8)
        self.assertNotIn("readOnly", next(it for it in container["volumeMounts"] if it["mountPath"] == "/run/tessera-health"))
        # docs/cluster.md finds the pod so.
        with open(os.path.join(ROOT, "docs", "cluster.md")) as page:
            label = re.search(r"kubectl get pod -l (\S+)=(\S+) --field-selector", page.read())
        self.assertEqual(daemon["spec"]["template"]["metadata"]["labels"], {label.group(1): label.group(2)})

    def test_a_daemon_sees_its_hosts_file_systems(self):
        pod = render("health")[0]["spec"]["template"]["spec"]
        paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
        mounts = {paths[mount["name"]]: mount for mount in pod["containers"][0]["volumeMounts"]}
        self.assertEqual(mounts["/"]["mountPropagation"], "HostToContainer")  # also what the host mounts later
        self.assertNotIn("readOnly", mounts["/"])
        self.assertEqual([mounts[path]["mountPath"] for path in ("/tmp", "/dev/shm")], ["/tmp", "/dev/shm"])

    def test_node_problem_detector_starts_the_copied_program(self):
        configuration = json.loads(render("health")[1]["data"]["tessera.json"])
        rule = configuration["rules"][0]
        with tempfile.TemporaryDirectory() as folder:
            copied = run(os.path.join(RECIPES, "copy_program.sh"), os.path.join(folder, "program"),
                         env={**os.environ, "PATH": f"{os.path.dirname(TESSERA)}:{os.environ['PATH']}"})
            self.assertEqual(copied.returncode, 0, copied.stdout)
            program = os.path.join(folder, "program", os.path.basename(rule["path"]))
            told = run(program, *rule["args"], "--folder", folder, env={})
            self.assertEqual(told.returncode, 2, told.stdout)  # unknown, because there is no daemon
            self.assertLessEqual(len(told.stdout.strip()), configuration["pluginConfig"]["max_output_length"])

    def test_the_program_is_copied_into_no_folder_of_others(self):
        with tempfile.TemporaryDirectory() as folder:
            def copy(name):
                return run(os.path.join(RECIPES, "copy_program.sh"), os.path.join(folder, name),
                           env={**os.environ, "PATH": f"{os.path.dirname(TESSERA)}:{os.environ['PATH']}"})

            for name in ("other", "our copy"):
                os.mkdir(os.path.join(folder, name))
            with open(os.path.join(folder, "other", "thesis.txt"), "w") as file:
                file.write("kept")
            self.assertEqual(copy("other").returncode, 2)
            self.assertEqual(os.listdir(os.path.join(folder, "other")), ["thesis.txt"])
            self.assertEqual(copy("our copy/").returncode, 0)
            with open(os.path.join(folder, "our copy", "tessera_health.sh"), "w") as file:
                file.write("beside the program")
            self.assertEqual(copy("our copy").returncode, 0)
            left = os.listdir(os.path.join(folder, "our copy"))
            self.assertIn("tessera_health.sh", left)
            self.assertEqual([name for name in left if name.startswith(".")], [])

    def test_values_for_soperator_are_those_of_slurm_conf(self):
        with open(os.path.join(RECIPES, "soperator.yaml")) as file:
            values = yaml.safe_load(file)
        with open(os.path.join(ROOT, "recipes", "slurm", "slurm.conf")) as file:
            lines = [line.strip() for line in file]
        jsonschema.validate(values, SCHEMAS["SoperatorValues"])
        health = values["healthCheckConfig"]
        self.assertIn(f"HealthCheckInterval={health['healthCheckInterval']}", lines)
        self.assertIn("HealthCheckNodeState=" + ",".join(entry["state"] for entry in health["healthCheckNodeState"]), lines)
        program = os.path.basename(health["healthCheckProgram"])
        self.assertTrue(os.access(os.path.join(ROOT, "recipes", "slurm", program), os.X_OK))
        for line in values["customSlurmConfig"].split():
            self.assertIn(line, lines)

    def test_paths_in_the_image_are_files_of_the_recipes(self):
        prefix = "/usr/share/tessera/recipes/"
        for path in glob.glob(os.path.join(RECIPES, "*.yaml")):
            with open(path) as file:
                for word in file.read().replace("[", " ").replace("]", " ").replace(",", " ").split():
                    if word.startswith(prefix):
                        self.assertTrue(os.access(os.path.join(ROOT, "recipes", word[len(prefix):]), os.X_OK), word)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
