# On a CPU:             docker build --target cpu -t rotor .
#                       docker run -v "$PWD:/work" rotor inspect artifacts/demo-model
# A server on a GPU:    docker build --target cuda -t rotor-vllm .
#                       docker run --gpus all -p 8000:8000 -v "$PWD/out:/out" rotor-vllm --model /out/demo
# The commands of rotor on that GPU: docker run --gpus all --entrypoint rotor ... rotor-vllm bench /out/demo

FROM python:3.11-slim AS cpu
# Triton compiles its launchers with a C compiler when a kernel is first called.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c /src/constraints.txt '/src[kernels,plots]'
RUN useradd --create-home rotor
USER rotor
WORKDIR /work
ENTRYPOINT ["rotor"]

# vLLM's own image, with torch for CUDA, Triton, a compiler and `vllm serve` as its entry point.
FROM vllm/vllm-openai:v0.32.0 AS cuda
COPY . /src
RUN pip install --no-cache-dir /src
WORKDIR /work
