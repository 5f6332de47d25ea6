# Grades a class where answers can harm nothing. book/grading.md says how it is run, and what it adds.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /zero_ref
COPY Makefile pyproject.toml requirements.txt README.md LICENSE LICENSE-docs ./
COPY requirements requirements
COPY zero_ref zero_ref
COPY zero_ref_course zero_ref_course
COPY notebooks notebooks
RUN make install
USER 65534:65534
ENTRYPOINT ["/zero_ref/.venv/bin/zero-ref", "grade", "--source", "/zero_ref/notebooks"]
