//! The program around the library: arguments, logs, signals.

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use controller::component::Component;
use controller::fetch::{self, FetchSpec, Patience, Progress};
use controller::model::HubEndpoint;
use controller::order::Settings;
use controller::recipe::RecipeBook;
use controller::render::{Installation, PROGRESS_PORT, TOKEN_VARIABLES, VERIFY_PORT};
use controller::run::{Options, run};
use controller::uninstall;
use controller::verify::{self, Question};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

/// Serves InferenceService orders on planned GPU placements.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Reconcile orders and classes (the default).
    Run(Box<RunArgs>),
    /// Bring a model to a volume; runs in a copy's init container.
    Fetch(FetchArgs),
    /// Say to the kubelet whether the runtime serves the model; runs beside it in a copy.
    Verify(VerifyArgs),
    /// Ask what remains, or end the controllers and remove the orders' workloads; the chart runs
    /// it before it is removed.
    Uninstall(UninstallArgs),
    /// Print the CustomResourceDefinitions.
    Crds,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Toggle {
    Enabled,
    None,
}

#[derive(Args)]
struct RunArgs {
    /// Components to run in this process; each has a lease of its own.
    #[arg(
        long,
        env = "AI_INFERENCE_COMPONENTS",
        value_delimiter = ',',
        default_value = "controller,planner"
    )]
    components: Vec<Component>,
    /// Address of the model hub, for the controller and for copies.
    #[arg(long, env = "HF_ENDPOINT", default_value = "https://huggingface.co")]
    hub_endpoint: HubEndpoint,
    /// Image of this program, which copies bring their model with.
    #[arg(
        long,
        env = "AI_INFERENCE_FETCH_IMAGE",
        default_value = "ai-inference/controller:dev"
    )]
    fetch_image: String,
    /// When copies' images are pulled: Always, IfNotPresent or Never.
    #[arg(long, env = "AI_INFERENCE_IMAGE_PULL_POLICY")]
    image_pull_policy: Option<String>,
    /// Secret of orders' namespaces for pulling images; may be repeated.
    #[arg(
        long = "image-pull-secret",
        env = "AI_INFERENCE_IMAGE_PULL_SECRETS",
        value_delimiter = ','
    )]
    image_pull_secrets: Vec<String>,
    /// Another image for a recipe: NAME=IMAGE; may be repeated.
    #[arg(long = "recipe-image", value_parser = pair)]
    recipe_images: Vec<(String, String)>,
    /// Another release name for a recipe: NAME=RELEASE; may be repeated.
    #[arg(long = "recipe-release", value_parser = pair)]
    recipe_releases: Vec<(String, String)>,
    /// Folder of recipes that replaces the shipped ones.
    #[arg(long, env = "AI_INFERENCE_RECIPES")]
    recipes: Option<PathBuf>,
    /// Tie to the model catalog.
    #[arg(
        long,
        env = "AI_INFERENCE_CATALOG_MODE",
        value_enum,
        default_value = "enabled"
    )]
    catalog_mode: Toggle,
    /// Address of /livez, /readyz and /metrics.
    #[arg(
        long,
        env = "AI_INFERENCE_ADMIN_ADDRESS",
        default_value = "0.0.0.0:8080"
    )]
    admin_address: SocketAddr,
    /// Namespace of the controller and of its lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = inference_api::names::PLATFORM_NAMESPACE)]
    namespace: String,
    /// Identity of this process in the election.
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,
    /// Name of the controller's ServiceAccount.
    #[arg(
        long,
        env = "AI_INFERENCE_SERVICE_ACCOUNT",
        default_value = "ai-inference-controller"
    )]
    service_account: String,
    /// Run without an election: only where there is no other process.
    #[arg(long)]
    no_election: bool,
    /// Do not make the class default-llm.
    #[arg(long)]
    no_default_class: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err(format!("{text:?} is not NAME=VALUE")),
    }
}

#[derive(Args)]
struct UninstallArgs {
    /// Remove workloads although orders remain.
    #[arg(long)]
    confirm: bool,
    /// Namespace of the platform.
    #[arg(long, env = "POD_NAMESPACE", default_value = inference_api::names::PLATFORM_NAMESPACE)]
    namespace: String,
    /// Deployment that runs a component; may be repeated.
    #[arg(long = "deployment", default_value = "controller")]
    deployments: Vec<String>,
}

#[derive(Args)]
struct FetchArgs {
    /// What to fetch, as JSON.
    #[arg(long, env = "AI_INFERENCE_FETCH_SPEC")]
    spec: String,
    /// Folder of models on the volume.
    #[arg(long, env = "AI_INFERENCE_FETCH_TARGET")]
    target: PathBuf,
    /// Address of GET /progress.
    #[arg(long, default_value_t = SocketAddr::from(([0, 0, 0, 0], PROGRESS_PORT as u16)))]
    progress_address: SocketAddr,
    /// Seconds without a byte after which a download is resumed.
    #[arg(long, default_value_t = 60)]
    stall_seconds: u64,
    /// Where the last words go.
    #[arg(long, default_value = "/dev/termination-log")]
    termination_log: PathBuf,
}

#[derive(Args)]
struct VerifyArgs {
    /// Name that the model has to be served by.
    #[arg(long, env = "AI_INFERENCE_SERVED_NAME")]
    model: String,
    /// Where the runtime lists its models.
    #[arg(long, env = "AI_INFERENCE_MODELS_URL")]
    url: String,
    /// The endpoint's token.
    #[arg(long, env = "AI_INFERENCE_ENDPOINT_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Address of GET /ready.
    #[arg(long, default_value_t = SocketAddr::from(([0, 0, 0, 0], VERIFY_PORT as u16)))]
    address: SocketAddr,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,kube=warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    // Before anything that may speak TLS.
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        warn!("A cryptography provider was installed already.");
    }
    let result = match cli.command {
        Some(Command::Crds) => print_crds(),
        Some(Command::Verify(args)) => with_runtime(|| do_verify(args)),
        Some(Command::Uninstall(args)) => with_runtime(|| do_uninstall(args)),
        Some(Command::Fetch(args)) => with_runtime(|| do_fetch(args)),
        Some(Command::Run(args)) => with_runtime(|| do_run(*args)),
        None => with_runtime(|| do_run(cli.run)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}.");
            ExitCode::FAILURE
        }
    }
}

fn with_runtime<F: Future<Output = Result<()>>>(work: impl FnOnce() -> F) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let result = runtime.block_on(work());
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

fn print_crds() -> Result<()> {
    use std::io::Write;
    std::io::stdout().write_all(inference_api::crd_yaml()?.as_bytes())?;
    Ok(())
}

async fn do_run(args: RunArgs) -> Result<()> {
    let images: BTreeMap<_, _> = args.recipe_images.into_iter().collect();
    let releases: BTreeMap<_, _> = args.recipe_releases.into_iter().collect();
    let recipes = match &args.recipes {
        Some(folder) => RecipeBook::from_folder(folder)?,
        None => RecipeBook::shipped()?,
    }
    .with_overrides(&images, &releases)?;
    let identity = args
        .identity
        .unwrap_or_else(|| format!("process-{}", std::process::id()));
    let options = Options {
        components: args.components.into_iter().collect(),
        settings: Settings {
            installation: Installation {
                fetch_image: args.fetch_image,
                image_pull_policy: args.image_pull_policy,
                image_pull_secrets: args.image_pull_secrets,
                hub_endpoint: args.hub_endpoint.to_string(),
            },
            catalog: args.catalog_mode == Toggle::Enabled,
            service_account: format!("{}:{}", args.namespace, args.service_account),
        },
        hub: args.hub_endpoint,
        recipes,
        admin: Some(args.admin_address),
        election: (!args.no_election).then_some((args.namespace, identity)),
        default_class: !args.no_default_class,
    };
    let client = kube::Client::try_default()
        .await
        .context("connecting to the API server")?;
    let stop = CancellationToken::new();
    let signalled = stop.clone();
    tokio::spawn(async move {
        terminated().await;
        info!("Asked to end.");
        signalled.cancel();
    });
    run(client, options, stop).await
}

async fn do_uninstall(args: UninstallArgs) -> Result<()> {
    let options = uninstall::Options {
        confirmed: args.confirm,
        namespace: args.namespace,
        deployments: args.deployments,
    };
    let client = kube::Client::try_default()
        .await
        .context("connecting to the API server")?;
    uninstall::run(client, &options).await
}

/// Waits for SIGTERM or SIGINT.
async fn terminated() {
    use tokio::signal::unix::{SignalKind, signal};
    let (term, interrupt) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    );
    match (term, interrupt) {
        (Ok(mut term), Ok(mut interrupt)) => {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        _ => std::future::pending().await,
    }
}

async fn do_verify(args: VerifyArgs) -> Result<()> {
    let question = Question {
        url: args.url,
        model: args.model,
        token: args.token.filter(|token| !token.is_empty()),
    };
    let client = verify::client().context("making the client of the runtime")?;
    tokio::select! {
        ended = verify::serve(args.address, client, question) => ended.context("serving GET /ready"),
        () = terminated() => Ok(()),
    }
}

async fn do_fetch(args: FetchArgs) -> Result<()> {
    let spec: FetchSpec =
        serde_json::from_str(&args.spec).context("the download's specification can't be read")?;
    let token = TOKEN_VARIABLES
        .iter()
        .filter_map(|v| std::env::var(v).ok())
        .map(|t| t.trim().to_owned())
        .find(|t| !t.is_empty());
    let progress = Progress::of(&spec.files);
    let served = progress.clone();
    tokio::spawn(async move {
        if let Err(error) = fetch::serve_progress(args.progress_address, served).await {
            warn!(%error, "The progress can't be served; the download goes on.");
        }
    });
    let patience = Patience {
        stall: Duration::from_secs(args.stall_seconds.max(1)),
        ..Patience::default()
    };
    let work = fetch::fetch(&spec, &args.target, token.as_deref(), patience, &progress);
    tokio::select! {
        result = work => {
            if let Err(error) = &result {
                let words = format!("{}: {error}", error.reason());
                // The log has it too; a missing file is no reason to fail otherwise.
                let _ = std::fs::write(&args.termination_log, words);
            }
            result?;
            Ok(())
        }
        () = terminated() => anyhow::bail!("asked to end; the next start goes on from here"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_option_of_the_program_is_set_by_the_chart() {
        let template = include_str!("../chart/templates/deployment.yaml");
        let cli = Cli::command();
        let run = cli.find_subcommand("run").unwrap();
        for argument in run.get_arguments() {
            let long = argument.get_long().unwrap_or_default();
            let set = argument.get_env().is_some_and(|name| {
                template.contains(&format!("- name: {}\n", name.to_str().unwrap()))
            }) || template.contains(&format!("- --{long}"));
            // Several processes may run in the chart's Deployments.
            assert!(set || ["help", "no-election"].contains(&long), "--{long}");
        }
    }
}
