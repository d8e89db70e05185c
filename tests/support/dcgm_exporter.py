"""A real HTTP server that serves a page in the form of dcgm-exporter."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HELP = {
    "DCGM_FI_DEV_SM_CLOCK": "gauge SM clock frequency (in MHz).",
    "DCGM_FI_DEV_MEM_CLOCK": "gauge Memory clock frequency (in MHz).",
    "DCGM_FI_DEV_POWER_USAGE": "gauge Power draw (in W).",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter Total energy consumption since boot (in mJ).",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "gauge Current clock event reasons (bitmask).",
    "DCGM_FI_PROF_SM_ACTIVE": "gauge The ratio of cycles an SM has at least 1 warp assigned.",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gauge Ratio of cycles the tensor (HMMA) pipe is active.",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gauge Ratio of cycles the device memory interface is active.",
}
LOADED = {
    "DCGM_FI_DEV_SM_CLOCK": "1410",
    "DCGM_FI_DEV_MEM_CLOCK": "1215",
    "DCGM_FI_DEV_POWER_USAGE": "391.263",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "322036000",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "4",
    "DCGM_FI_PROF_SM_ACTIVE": "0.912",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.430433",
    "DCGM_FI_PROF_DRAM_ACTIVE": "0.690789",
}


def gpu(place, uuid, values, more=""):
    labels = (
        f'gpu="{place}",UUID="GPU-{uuid}",pci_bus_id="00000000:{place + 1:02X}:00.0",device="nvidia{place}",'
        f'modelName="NVIDIA A100-SXM4-40GB",{more}Hostname="node \\"a\\", rack {{1}}"'
    )
    return {metric: f"{metric}{{{labels}}} {value}" for metric, value in values.items()}


def page(*gpus):
    lines = []
    for metric, described in HELP.items():
        kind, _, text = described.partition(" ")
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
        lines += [rows[metric] for rows in gpus if metric in rows]
    return "\n".join([*lines, ""])


class Exporter:
    def __init__(self):
        self.text, self.status = "", 200
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = exporter.text.encode()
                self.send_response(exporter.status if self.path == "/metrics" else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
