//! Speed of `predict`: rows a second over all shipped measurements, and how it depends on the size of a case.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use tpusim::calibration::data;
use tpusim::hardware::{self, Calibration};
use tpusim::measurements::{self, Table};
use tpusim::study::predict::{ChipFiles, predict};

fn main() {
    divan::main();
}

#[divan::bench]
fn all_measurements(bencher: Bencher) {
    let tables = data::shipped().expect("well-formed files");
    let rows: usize = tables.iter().map(|table| table.rows.len()).sum();
    let files = ChipFiles::default();
    let calibration = Calibration::empty();
    bencher.counter(ItemsCount::new(rows)).bench_local(|| {
        for table in &tables {
            black_box(predict(table, &files, &calibration));
        }
    });
}

fn matmul(side: u64) -> Table {
    let text = format!("device,op,params,dtype\ntpu-v6e,matmul,m={side};k={side};n={side},bf16\n");
    measurements::parse("bench", text.as_bytes()).expect("a table")
}

/// The time must not grow with the matrix: the pattern of the steps is found once.
#[divan::bench(args = [256, 1024, 4096, 16384])]
fn square_matmul(bencher: Bencher, side: u64) {
    let table = matmul(side);
    let files = ChipFiles::default();
    let calibration = Calibration::empty();
    hardware::load("tpu-v6e").expect("a shipped chip");
    bencher.bench_local(|| predict(black_box(&table), &files, &calibration));
}
