# One image for every Berth process: `docker build -t berth .`, then `docker run berth agent --help`.
# The same sources and the same base make the same image, byte for byte where the builder sets all times alike
# (`buildah build --timestamp 0`, BuildKit's `rewrite-timestamp`): so no step may leave the time in a file.
# Its Python is built with profile and link-time optimisation, as Debian's own is: the data plane's work then takes a
# quarter less CPU than with a plain build.
FROM python:3.11-slim-bookworm AS build
# PID 1 must pass signals on from its first moment and reap what it did not start; Python does neither
# before it has imported its modules.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements requirements
# What installs does not go into the image.
RUN python -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt \
    && python -m venv --without-pip /opt/berth \
    && /build/bin/pip --python /opt/berth/bin/python install --no-cache-dir --no-compile --require-hashes \
        -r requirements/runtime.txt
# A third of what was installed is never imported: classes for every kind and call of the API server (Berth
# reads JSON), the packages' own tests, what compiles Fortran, what colours source code.
RUN find /opt/berth/lib -regex '.*/kubernetes/\(aio/\)?client/\(api\|models\)/.*\.py' ! -name __init__.py -delete \
    && find /opt/berth/lib -type d -regex '.*/\(tests\|numpy/f2py\|numpy/distutils\|site-packages/pygments\)' \
        -prune -exec rm -rf {} +
COPY pyproject.toml README.md LICENSE ./
COPY berth berth
COPY agent agent
COPY binder binder
COPY loader loader
COPY proxy proxy
COPY scaler scaler
# Compiled once, here, so that no start of a process begins with it; checked by nothing, as nothing changes.
RUN SOURCE_DATE_EPOCH=0 /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /build/bin/pip --python /opt/berth/bin/python install --no-cache-dir --no-compile --no-deps --no-index \
        /wheels/*.whl \
    && PYTHONHASHSEED=0 /opt/berth/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/berth/lib

FROM python:3.11-slim-bookworm
COPY --from=build /usr/bin/tini /usr/bin/tini
COPY --from=build /opt/berth /opt/berth
ENV PATH=/opt/berth/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can verify runAsNonRoot.
USER 65532:65532
ENTRYPOINT ["tini", "--", "berth"]
