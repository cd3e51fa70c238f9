#!/bin/bash
# Prolog: a node that multiplies wrongly, or slowly, does not get the job. TESSERA_TFLOPS: what its peers reach, as
# `tessera health check --active --json` prints it (gemm_tflops).
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec tessera health check --active --expect-tflops "${TESSERA_TFLOPS:-0}"
