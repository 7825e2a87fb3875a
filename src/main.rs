//! tmp
fn main() {
    let name = std::env::args().nth(1).unwrap();
    let no: [&str; 0] = [];
    let w = match tpusim::workload::load(&name, &no) { Ok(w) => w, Err(e) => { println!("{}", e.render()); return; } };
    let base = w.0.baseline.as_ref().map(|b| tpusim::workload::load_baseline(b, &name, &w.1).unwrap());
    let chips: Vec<_> = w.0.hardware.iter().map(|h| tpusim::hardware::load(h).unwrap()).collect();
    let r = tpusim::study::run(tpusim::study::RunRequest { workload: &w, baseline: base.as_ref(), chips: &chips, overrides: vec![], numeric: None });
    match r {
        Err(e) => println!("{e}"),
        Ok(r) => {
            println!("{}", r.headline);
            for c in &r.chips { for p in &c.plans {
                println!("{} {} {:.3} ms base {:?}", c.name, p.name, p.total_us/1e3, p.speedup_over_baseline);
                for s in &p.stages { println!("   {:8} {:9.3} pub {:?} {} next {} mxu {:.3} vpu {:.3} tr {:.3} xl {:.3} hbm {:.3} lat {:.3} launch {:.3} MB {:.1} grid {}x{} vmem {:.2} MiB", s.stage, s.time_us/1e3, s.published_us.map(|x| x/1e3), s.bound, s.next_bound, s.mxu_us/1e3, s.vpu_us/1e3, s.transcendental_us/1e3, s.cross_lane_us/1e3, s.hbm_us/1e3, s.latency_us/1e3, s.launch_us/1e3, s.hbm_bytes as f64/1e6, s.grid_parallel, s.grid_sequential, s.vmem_bytes as f64/1048576.0); }
            } }
            for w in &r.warnings { println!("! {w}"); }
        }
    }
}
