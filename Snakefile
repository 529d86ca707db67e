# flexroll: config -> cells -> one process an engine configuration and session -> table, claims, results/<run>/results.md
#   snakemake --cores all                          the matrix of config.yaml
#   snakemake --cores all --config preset=demo     workflow/presets/demo.yaml in its place (or --configfile FILE)
#   snakemake --cores all --config stacks=torch2.11    only the cells of that stack
from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/common.smk"
include: "workflow/rules/inputs.smk"
include: "workflow/rules/quantise.smk"
include: "workflow/rules/autotune.smk"
include: "workflow/rules/report.smk"


if not PUBLISHED:

    include: "workflow/rules/warmup.smk"
    include: "workflow/rules/bench.smk"
    include: "workflow/rules/drift.smk"
    include: "workflow/rules/perplexity.smk"
    include: "workflow/rules/quality.smk"
    include: "workflow/rules/grpo.smk"


rule all:
    default_target: True
    input:
        f"results/{RUN}/results.md",
        f"results/{RUN}/results.html",
        # Named here so that a lost or cleared one (`flexroll retry`) is measured again though the document exists.
        MANIFESTS,
        DRIFT,
        QUALITY,
        GRPO,


# Not earlier: what needs no container (a dry run, a lint) needs no image either.
onstart:
    if NO_IMAGES:
        raise WorkflowError(NO_IMAGES)
