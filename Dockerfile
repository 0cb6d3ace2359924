# dynsparse with its command line, on torch for the CPU:
#
#   docker build -t dynsparse . && docker run --rm dynsparse info
#
# The kernels are compiled in the first stage; the image has no compiler.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY CMakeLists.txt LICENSE README.md pyproject.toml ./
COPY benchmarks/benchmarks.yml benchmarks/
COPY csrc csrc
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
COPY constraints.txt /constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu "$(echo /wheels/*.whl)[apps]" \
    && rm -r /wheels /constraints.txt
RUN useradd --create-home dynsparse
USER dynsparse
WORKDIR /home/dynsparse
ENTRYPOINT ["dynsparse"]
CMD ["info"]
