#!/usr/bin/env bash
# Makes p2pkv/_etcd_pb2.py and .pyi from p2pkv/_etcd.proto.
#
# Generated code runs with the protobuf runtime of its own version or any later one, so the
# generator is an old one on purpose: it sets the floor "protobuf >= 6.31.1" in setup.cfg.
# Raise both together.
set -euo pipefail
cd "$(dirname "$0")/.."

generator="grpcio-tools==1.74.0"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$generator" "setuptools<81"
# Compiled by its path from the root, which becomes the descriptor's name: unique in a process.
"$work/venv/bin/python" -W ignore -m grpc_tools.protoc -I . \
    --python_out=. --pyi_out=. p2pkv/_etcd.proto
# The generator leaves type arguments out.
sed -i '1i # mypy: disable-error-code="type-arg"' p2pkv/_etcd_pb2.pyi
