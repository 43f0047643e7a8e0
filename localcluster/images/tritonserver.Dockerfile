# Triton with its python backend, laid out as in NVIDIA's image: what PyPI's nvidia-pytriton carries.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements.txt requirements.txt
RUN python -m venv /build \
    && python -m venv --without-pip /opt/python \
    && /build/bin/pip --python /opt/python/bin/python install --quiet --no-cache-dir --no-compile --no-deps \
        --require-hashes -r requirements.txt
# The wheel ships one stub for each Python version beside the backends; Triton looks for it inside.
RUN mkdir -p /opt/tritonserver/backends \
    && packages=/opt/python/lib/python3.11/site-packages \
    && mv "$packages/pytriton/tritonserver/bin" /opt/tritonserver/bin \
    && mv "$packages/pytriton/tritonserver/backends/python" /opt/tritonserver/backends/python \
    && mv "$packages/pytriton/tritonserver/caches" /opt/tritonserver/caches \
    && mv "$packages/pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub" \
        /opt/tritonserver/backends/python/ \
    && mv "$packages/nvidia_pytriton.libs" /opt/tritonserver/lib \
    && chmod 755 /opt/tritonserver/bin/tritonserver /opt/tritonserver/backends/python/triton_python_backend_stub \
    && rm -rf "$packages"/pytriton "$packages"/nvidia_pytriton*

FROM python:3.11-slim-bookworm
# The stub embeds the interpreter's shared library; the probes of deploy/ ask with curl, as NVIDIA's image has it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl=7.* libpython3.11=3.11.* \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/log/*
COPY --from=build /opt /opt
# The embedded interpreter takes its place from the first python on PATH: that one has the numpy of the models.
ENV PATH=/opt/tritonserver/bin:/opt/python/bin:$PATH LD_LIBRARY_PATH=/opt/tritonserver/lib
