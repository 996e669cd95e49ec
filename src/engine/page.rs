//! The `/metrics` page: everything that never changes is rendered once, a scrape only writes the numbers.
//!
//! `?name[]=` selects samples as the restricted registry of Python's prometheus_client does: by the exact name of a
//! sample (`..._sum`, not the histogram's base name), keeping the header of every family that has one left.

use std::fmt::Write;

use super::metrics::{ADMISSION_REJECTIONS, FAMILIES, Family, Metrics, NIXL_FAMILIES, Source};

/// Media type of the page.
pub const CONTENT_TYPE: &str = "text/plain; version=1.0.0; charset=utf-8";

/// Lines that share a sample name. A value follows each prefix, unless the group is fixed.
struct Group {
    name: String,
    header: String,
    prefixes: Vec<String>,
    fixed: bool,
}

/// A family of the page.
struct Section {
    header: String,
    groups: Vec<Group>,
    /// Where the values come from, unless every group is fixed.
    source: Option<&'static Source>,
}

/// The page of one engine without its numbers.
pub struct Page {
    sections: Vec<Section>,
    lora_header: String,
    max_lora: u32,
    tail: Vec<Section>,
    last_size: std::sync::atomic::AtomicUsize,
}

/// What the page says about the engine itself.
pub struct PageConfig<'a> {
    /// First served model name.
    pub model: &'a str,
    /// KV blocks.
    pub blocks: u64,
    /// Tokens per block.
    pub block_size: u32,
    /// Longest request.
    pub max_model_len: u32,
    /// Adapters in one batch.
    pub max_lora: u32,
    /// Unix time of the start, seconds.
    pub started: f64,
    /// Size to which unrelated series fill an unfiltered page, bytes.
    pub padding: usize,
    /// Whether it has NIXL's families.
    pub nixl: bool,
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A sample's name and its labels, sorted by name as the Python client prints them.
fn prefix(name: &str, labels: &[(&str, &str)]) -> String {
    let mut labels = labels.to_vec();
    labels.sort_unstable();
    let mut line = name.to_owned();
    for (index, (key, value)) in labels.iter().enumerate() {
        let opening = if index == 0 { '{' } else { ',' };
        let _ = write!(line, "{opening}{key}=\"{}\"", escape(value));
    }
    if !labels.is_empty() {
        line.push('}');
    }
    line.push(' ');
    line
}

/// Writes a number as prometheus_client does: always with a point, with an exponent from a million up.
fn number(out: &mut String, value: f64) {
    if value.fract() == 0.0 && (0.0..1e6).contains(&value) {
        let _ = write!(out, "{}.0", value as u64);
        return;
    }
    let plain = format!("{value:?}");
    match plain.find('.') {
        Some(dot) if value > 0.0 && dot > 6 => {
            let mantissa = format!("{}.{}{}", &plain[..1], &plain[1..dot], &plain[dot + 1..]);
            let _ = write!(out, "{}e+{:02}", mantissa.trim_end_matches(['0', '.']), dot - 1);
        }
        _ => out.push_str(&plain),
    }
}

fn bound(value: f64) -> String {
    let mut text = String::new();
    number(&mut text, value);
    text
}

fn header(name: &str, kind: &str, help: &str) -> String {
    format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")
}

fn fixed(name: &str, kind: &str, help: &str, lines: Vec<String>) -> Section {
    let group = Group { name: name.to_owned(), header: String::new(), prefixes: lines, fixed: true };
    Section { header: header(name, kind, help), groups: vec![group], source: None }
}

fn section(family: &'static Family, config: &PageConfig<'_>) -> Section {
    let base: &[(&str, &str)] = if family.name == ADMISSION_REJECTIONS {
        &[("model_name", config.model)]
    } else {
        &[("engine", "0"), ("model_name", config.model)]
    };
    let series: Vec<Vec<(&str, &str)>> = match family.label {
        None => vec![base.to_vec()],
        Some((label, values)) => {
            values.iter().map(|value| base.iter().copied().chain([(label, *value)]).collect()).collect()
        }
    };
    let group = |name: String| {
        let prefixes = series.iter().map(|labels| prefix(&name, labels)).collect();
        Group { name, header: String::new(), prefixes, fixed: false }
    };
    let created = || {
        let name = format!("{}_created", family.name);
        let line =
            |labels: &Vec<(&str, &str)>| format!("{}{}\n", prefix(&name, labels), bound(config.started));
        let prefixes = series.iter().map(line).collect();
        Group { header: header(&name, "gauge", family.help), prefixes, fixed: true, name }
    };
    let source = Some(&family.source);
    match family.source {
        Source::Gauge(_) => Section {
            source,
            header: header(family.name, "gauge", family.help),
            groups: vec![group(family.name.to_owned())],
        },
        Source::Counter(_) => {
            let name = format!("{}_total", family.name);
            let header = header(&name, "counter", family.help);
            Section { source, header, groups: vec![group(name), created()] }
        }
        Source::Histogram(read) => {
            let name = format!("{}_bucket", family.name);
            let bounds =
                read(&Metrics::default()).bounds.iter().map(|b| bound(*b)).chain(["+Inf".to_owned()]);
            let prefixes = bounds
                .map(|le| {
                    prefix(&name, &base.iter().copied().chain([("le", le.as_str())]).collect::<Vec<_>>())
                })
                .collect();
            let buckets = Group { name, header: String::new(), prefixes, fixed: false };
            let rest =
                [group(format!("{}_count", family.name)), group(format!("{}_sum", family.name)), created()];
            Section {
                source,
                header: header(family.name, "histogram", family.help),
                groups: [buckets].into_iter().chain(rest).collect(),
            }
        }
    }
}

fn cache_config(config: &PageConfig<'_>) -> Section {
    let name = "vllm:cache_config_info";
    let tokens = config.blocks * u64::from(config.block_size);
    let mut concurrency = String::new();
    number(&mut concurrency, tokens as f64 / f64::from(config.max_model_len));
    let (block_size, blocks, tokens) =
        (config.block_size.to_string(), config.blocks.to_string(), tokens.to_string());
    let labels = [
        ("_block_size_resolved", "True"),
        ("block_size", block_size.as_str()),
        ("cache_dtype", "auto"),
        ("cache_hit_alignment_tokens", "None"),
        ("effective_attention_block_size", block_size.as_str()),
        ("enable_mamba_shared_prefix_checkpoint", "False"),
        ("enable_prefix_caching", "True"),
        ("engine", "0"),
        ("gpu_memory_utilization", "0.92"),
        ("hash_block_size", "None"),
        ("is_attention_free", "False"),
        ("kv_cache_dtype_skip_layers", "[]"),
        ("kv_cache_layout", "None"),
        ("kv_cache_max_concurrency", concurrency.as_str()),
        ("kv_cache_memory_bytes", "1073741824"),
        ("kv_cache_size_tokens", tokens.as_str()),
        ("kv_offloading_backend", "native"),
        ("kv_offloading_size", "None"),
        ("kv_sharing_fast_prefill", "False"),
        ("mamba_block_size", "None"),
        ("mamba_cache_dtype", "auto"),
        ("mamba_cache_mode", "none"),
        ("mamba_page_size_padded", "None"),
        ("mamba_ssm_cache_dtype", "float32"),
        ("num_cpu_blocks", "None"),
        ("num_gpu_blocks", blocks.as_str()),
        ("num_gpu_blocks_override", blocks.as_str()),
        ("prefix_cache_retention_interval", "0"),
        ("prefix_caching_hash_algo", "sha256_cbor"),
        ("prefix_match_unit", "None"),
        ("replayssm_buffer_len", "16"),
        ("skip_page_size_padded", "None"),
        ("sliding_window", "None"),
        ("swa_bounded_replay", "True"),
        ("use_kda_recoverssm", "False"),
        ("use_replayssm", "False"),
        ("user_specified_block_size", "True"),
    ];
    fixed(name, "gauge", "Configuration of the KV cache.", vec![format!("{}1.0\n", prefix(name, &labels))])
}

impl Page {
    /// Renders everything that does not change.
    pub fn new(config: &PageConfig<'_>) -> Self {
        let start_name = "process_start_time_seconds";
        let start = format!("{start_name} {}\n", bound(config.started));
        let mut sections =
            vec![fixed(start_name, "gauge", "Start of the process, Unix seconds.", vec![start])];
        let nixl = if config.nixl { NIXL_FAMILIES } else { &[] };
        sections.extend(FAMILIES.iter().chain(nixl).map(|family| section(family, config)));
        let lora_header = header(
            "vllm:lora_requests_info",
            "gauge",
            "Adapters with requests; the value is the time of the update.",
        );
        let mut page = Self {
            sections,
            lora_header,
            max_lora: config.max_lora,
            tail: vec![cache_config(config)],
            last_size: 0.into(),
        };
        let size = page.render(&Metrics::default(), None).len();
        page.pad(config.padding.saturating_sub(size));
        page
    }

    fn pad(&mut self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let name = "http_request_duration_seconds_bucket";
        let mut lines = Vec::new();
        let mut size = 0;
        while size < bytes {
            let (handler, le) =
                (format!("/padding/{}", lines.len() / 4), ["0.1", "0.5", "1.0", "+Inf"][lines.len() % 4]);
            let labels = [("handler", handler.as_str()), ("le", le), ("method", "GET")];
            let line = format!("{}1.0\n", prefix(name, &labels));
            size += line.len();
            lines.push(line);
        }
        let mut padding = fixed(name, "histogram", "", lines);
        padding.header = header("http_request_duration_seconds", "histogram", "Duration of HTTP requests.");
        self.tail.push(padding);
    }

    /// The page with these numbers; `names` restricts it to samples with one of these names.
    pub fn render(&self, metrics: &Metrics, names: Option<&[String]>) -> String {
        use std::sync::atomic::Ordering::Relaxed;
        let wanted = |name: &str| names.is_none_or(|names| names.iter().any(|n| n == name));
        let mut out = String::with_capacity(self.last_size.load(Relaxed).max(512));
        let mut values = Vec::with_capacity(32);
        for section in &self.sections {
            if !section.groups.iter().any(|group| wanted(&group.name)) {
                continue;
            }
            values.clear();
            if let Some(source) = section.source {
                family_values(source, metrics, &mut values);
            }
            section.write(&mut out, &values, wanted);
        }
        if !metrics.lora_requests.is_empty() && wanted("vllm:lora_requests_info") {
            self.write_adapters(&mut out, metrics);
        }
        for section in &self.tail {
            if section.groups.iter().any(|group| wanted(&group.name)) {
                section.write(&mut out, &[], wanted);
            }
        }
        self.last_size.store(out.len() + 256, Relaxed);
        out
    }

    fn write_adapters(&self, out: &mut String, metrics: &Metrics) {
        out.push_str(&self.lora_header);
        let max_lora = self.max_lora.to_string();
        for (running, waiting, time) in &metrics.lora_requests {
            let labels = [
                ("max_lora", max_lora.as_str()),
                ("running_lora_adapters", running),
                ("waiting_lora_adapters", waiting),
            ];
            out.push_str(&prefix("vllm:lora_requests_info", &labels));
            number(out, *time);
            out.push('\n');
        }
    }
}

fn family_values(source: &Source, metrics: &Metrics, values: &mut Vec<f64>) {
    match source {
        Source::Gauge(read) | Source::Counter(read) => read(metrics, values),
        Source::Histogram(read) => {
            let histogram = read(metrics);
            let mut count = 0;
            values.extend(histogram.buckets.iter().map(|bucket| {
                count += bucket;
                count as f64
            }));
            values.extend([count as f64, histogram.sum]);
        }
    }
}

impl Section {
    fn write(&self, out: &mut String, values: &[f64], wanted: impl Fn(&str) -> bool) {
        out.push_str(&self.header);
        let mut values = values.iter();
        for group in &self.groups {
            let write = wanted(&group.name);
            if write {
                out.push_str(&group.header);
            }
            for prefix in &group.prefixes {
                let value = if group.fixed { None } else { values.next() };
                if write {
                    out.push_str(prefix);
                    if let Some(value) = value {
                        number(out, *value);
                        out.push('\n');
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
