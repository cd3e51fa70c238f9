#!/usr/bin/env python3
"""Checks that alerts and dashboards ask for metrics that the program exports, and that alerts fire when they should.

    monitoring_test.py TESSERA NVML_STUB
"""
import fnmatch
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

from free_port import free_port

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
MONITORING = os.path.join(ROOT, "monitoring")
TESSERA, NVML_STUB = sys.argv[1:3]
METRIC = re.compile(r"\btessera_(?:train|launch|node)_\w+")
# This machine and this run do not export these metrics.
UNKNOWN_HERE = {"tessera_train_mfu_ratio", "tessera_launch_mtbf_seconds", "tessera_launch_mttr_seconds"}


def scrape(port, wanted, process, seconds=60):
    """Returns {name: type} of the exported metrics, and their text, as soon as `wanted` is exported."""
    deadline = time.time() + seconds
    while time.time() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                text = answer.read().decode()
        except OSError:
            time.sleep(0.1)
            continue
        found = dict(re.findall(r"^# TYPE (tessera_\S+) (\S+)$", text, re.M))
        if wanted in found:
            return found, text
        time.sleep(0.1)
    raise AssertionError(f"{wanted} is not exported at port {port}; the process ended with {process.poll()}")


def expressions():
    """Yields (where, expression) of all alerts and panels."""
    with open(os.path.join(MONITORING, "alerts.yml")) as file:
        for line in file:
            if match := re.match(r"\s+expr: (.*)", line):
                yield "alerts.yml", match.group(1)
    for name, board in dashboards():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{name}, {panel['title']}", target["expr"]


def dashboards():
    folder = os.path.join(MONITORING, "dashboards")
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name)) as file:
            yield name, json.load(file)


def exported(folder):
    """Returns {name: type} of the three exporters, with a node that has a GPU and a port. Returns their texts, too."""
    root, names, texts = os.path.join(folder, "root"), {}, []
    port_folder = os.path.join(root, "sys/class/infiniband/mlx5_0/ports/1/counters")
    os.makedirs(port_folder)
    for path, text in ((f"{port_folder}/../state", "4: ACTIVE"), (f"{port_folder}/symbol_error", "0"),
                       (f"{root}/gpus", "count 1\n0 temperature 95\n0 power 300000\n0 throttle 64\n0 link.0 1\n"
                                        "0 field.161.0 5\n")):
        with open(path, "w") as file:
            file.write(text)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    environment = {**os.environ, "TESSERA_NVML_STUB": f"{root}/gpus", "OMP_WAIT_POLICY": "passive"}

    port = free_port()
    daemon = subprocess.Popen([TESSERA, "health", "serve", "--folder", f"{folder}/health", "--period", "0.3", "--nvml", NVML_STUB,
                               "--sysroot", root, "--address", f"127.0.0.1:{port}"], env=environment, **quiet)
    try:
        scrape(port, "tessera_node_gpu_temperature_celsius", daemon)
        found, text = scrape(port, "tessera_node_gpu_xid_total", daemon)
        names.update(found)
        texts.append(text)
    finally:
        daemon.terminate()
        daemon.wait(10)

    with open(f"{folder}/text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"document {i} says {i * i}"}) + "\n" for i in range(300))
    subprocess.run([TESSERA, "data", "prepare", "--input", f"{folder}/text.jsonl", "--tokenizer", "bytes", "--output", f"{folder}/data"],
                   check=True, **quiet)
    ports = free_port(), free_port()
    launch = subprocess.Popen([TESSERA, "launch", "--prometheus-address", f"127.0.0.1:{ports[0]}", "--", "train",
                               os.path.join(ROOT, "configs/debugmodel.toml"), f"--training.dataset_path={folder}/data", "--training.seq_len=32",
                               f"--job.dump_folder={folder}/run", "--training.steps=100000", "--metrics.log_freq=1",
                               "--training.device=cpu", f"--metrics.prometheus_port={ports[1]}"], env=environment, **quiet)
    try:
        for port, wanted in zip(ports, ("tessera_launch_step", "tessera_train_loss")):
            found, text = scrape(port, wanted, launch)
            names.update(found)
            texts.append(text)
    finally:
        for _ in range(2):  # the second signal ends it at once
            launch.terminate()
            time.sleep(0.2)
        launch.wait(30)
    return names, texts


class Monitoring(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            cls.names, cls.texts = exported(folder)

    def test_every_metric_that_is_asked_for_is_exported(self):
        known = set(self.names) | UNKNOWN_HERE
        asked = [(where, name) for where, expression in expressions() for name in METRIC.findall(expression)]
        self.assertGreater(len(asked), 40)
        self.assertEqual([(where, name) for where, name in asked if name not in known], [])

    def test_rates_are_of_counters_and_of_nothing_else(self):
        for where, expression in expressions():
            for name in re.findall(r"(?:rate|increase)\((tessera_\w+)", expression):
                self.assertEqual(self.names[name], "counter", where)

    def test_counters_end_in_total(self):
        for name, kind in self.names.items():
            self.assertEqual(name.endswith("_total"), kind == "counter", name)

    def test_no_secret_is_exported(self):
        for text in self.texts:
            self.assertNotRegex(text, r"(?i)key=|token=|password|endpoint")

    def test_every_metric_is_in_the_documentation(self):
        with open(os.path.join(ROOT, "docs", "metrics.md")) as file:
            rows = dict(re.findall(r"^\| `(tessera_\w+_)` \| (.*) \|$", file.read(), re.M))
        self.assertEqual(len(rows), 3)
        documented = [prefix + name for prefix, names in rows.items() for name in re.findall(r"`([\w*]+)`", names)]
        unknown = [name for name in self.names if not any(fnmatch.fnmatch(name, known) for known in documented)]
        self.assertEqual(unknown, [])

    def test_dashboards_of_a_run_show_one_run(self):
        """Each run is a scrape job. Lines of two runs would have the same name."""
        metrics = {"run.json": "tessera_train_step", "incidents.json": "tessera_launch_step"}
        for name, board in dashboards():
            if name not in metrics:
                continue
            job = board["templating"]["list"][1]
            self.assertEqual(job["query"]["query"], f"label_values({metrics[name]}, job)")
            for panel in board["panels"]:
                for target in panel["targets"]:
                    selectors = re.findall(r"\btessera_\w+({[^}]*})?", target["expr"])
                    self.assertEqual(set(selectors), {'{job="$job"}'}, f"{name}, {panel['title']}")

    def test_dashboards_are_whole(self):
        seen = set()
        for name, board in dashboards():
            with self.subTest(name):
                self.assertNotIn(board["uid"], seen)
                seen.add(board["uid"])
                variables = [variable["name"] for variable in board["templating"]["list"]]
                self.assertEqual(variables, ["datasource"] if name == "nodes.json" else ["datasource", "job"])
                ids = [panel["id"] for panel in board["panels"]]
                self.assertEqual(len(ids), len(set(ids)))
                cells = set()
                for panel in board["panels"]:
                    self.assertEqual(panel["datasource"]["uid"], "${datasource}")
                    self.assertLessEqual(set(panel), {"id", "title", "type", "datasource", "gridPos", "fieldConfig", "targets"})
                    at = panel["gridPos"]
                    its = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
                    self.assertFalse(its & cells, f"{panel['title']} lies over another panel")
                    self.assertLessEqual(at["x"] + at["w"], 24)
                    cells |= its

    @unittest.skipUnless(shutil.which("promtool"), "there is no promtool: scripts/setup.sh cluster installs it")
    def test_alerts_fire_when_they_should(self):
        for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
            done = subprocess.run(["promtool", *words], cwd=MONITORING, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(done.returncode, 0, done.stdout)

    @unittest.skipUnless(shutil.which("promtool"), "there is no promtool: scripts/setup.sh cluster installs it")
    def test_every_expression_can_be_read(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rules.yml")
            with open(path, "w") as file:
                rules = [{"record": f"tessera:{i}", "expr": expression} for i, (_, expression) in enumerate(expressions())]
                json.dump({"groups": [{"name": "all", "rules": rules}]}, file)  # JSON is YAML
            done = subprocess.run(["promtool", "check", "rules", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(done.returncode, 0, done.stdout)

    @unittest.skipUnless(shutil.which("promtool"), "there is no promtool: scripts/setup.sh cluster installs it")
    def test_what_is_exported_is_prometheus_text(self):
        for text in self.texts:
            ours = "\n".join(line for line in text.splitlines() if "exposer_" not in line) + "\n"
            done = subprocess.run(["promtool", "check", "metrics"], input=ours, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(done.returncode, 0, done.stdout)


class Webhook(http.server.BaseHTTPRequestHandler):
    """The receiver of Alertmanager's messages."""
    told = []  # (alert, "firing" or "resolved")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Webhook.told += [(alert["labels"]["alertname"], alert["status"]) for alert in body["alerts"]]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@unittest.skipUnless(shutil.which("prometheus") and shutil.which("prometheus-alertmanager"),
                     "there is no prometheus or no prometheus-alertmanager: scripts/setup.sh cluster installs them")
class RealAlert(unittest.TestCase):
    """Goes from an XID to a message, and back, with the daemon, Prometheus, Alertmanager and a receiver."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = scratch.name
        webhook = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
        threading.Thread(target=webhook.serve_forever, daemon=True).start()
        self.addCleanup(webhook.server_close)
        self.addCleanup(webhook.shutdown)
        self.node, prometheus, alerts = free_port(), free_port(), free_port()
        self.write("gpus", "count 1\n")
        self.daemon = self.start(TESSERA, "health", "serve", "--folder", self.path("health"), "--period", "0.3", "--nvml",
                                 NVML_STUB, "--sysroot", self.path("root"), "--address",
                                 f"127.0.0.1:{self.node}")
        self.write("alertmanager.json", json.dumps({
            "route": {"receiver": "hook", "group_wait": "0s", "group_interval": "1s"},
            "receivers": [{"name": "hook", "webhook_configs": [{"url": f"http://127.0.0.1:{webhook.server_port}/"}]}]}))
        self.start("prometheus-alertmanager", f"--config.file={self.path('alertmanager.json')}", "--cluster.listen-address=",
                   f"--storage.path={self.path('alerts')}", f"--web.listen-address=127.0.0.1:{alerts}")
        self.write("prometheus.json", json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [os.path.join(MONITORING, "alerts.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alerts}"]}]}]},
            "scrape_configs": [{"job_name": "tessera-nodes", "static_configs": [{"targets": [f"127.0.0.1:{self.node}"]}]}]}))
        self.start("prometheus", f"--config.file={self.path('prometheus.json')}", f"--storage.tsdb.path={self.path('tsdb')}",
                   f"--web.listen-address=127.0.0.1:{prometheus}")

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)

    def start(self, *words):
        process = subprocess.Popen(words, env={**os.environ, "TESSERA_NVML_STUB": self.path("gpus")},
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait, 20)
        self.addCleanup(process.terminate)
        return process

    def wait_for(self, told):
        deadline = time.time() + 60
        while told not in Webhook.told:
            self.assertLess(time.time(), deadline, f"not told of {told}, only of {Webhook.told}")
            time.sleep(0.1)

    def test_fires_and_clears(self):
        scrape(self.node, "tessera_node_health_level", self.daemon)
        self.write("gpus", "count 1\n0 xid 79\n")
        self.wait_for(("NodeBad", "firing"))
        self.write("gpus", "count 1\n")
        subprocess.run([TESSERA, "health", "check", "--active", "--check-on-cpu", "--folder", self.path("health"),
                        "--nvml", NVML_STUB, "--sysroot", self.path("root")],
                       env={**os.environ, "TESSERA_NVML_STUB": self.path("gpus")},
                       stdout=subprocess.DEVNULL, check=True)
        self.wait_for(("NodeBad", "resolved"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
