//! The validation page belongs to the code, the data and the calibration beside it: digests are compared, nothing is fitted again.

use std::fs;
use std::path::Path;

use tpusim::calibration::data;
use tpusim::hardware;
use tpusim::report::validation;
use tpusim::study::predict::ChipFiles;

#[test]
fn the_page_is_that_of_the_data_and_of_the_calibration() {
    let tables = data::shipped().expect("well-formed files");
    let data = data::screen(&tables, &ChipFiles::default());
    let calibration = hardware::shipped_calibration();
    assert_eq!(
        calibration.data_digest, data.digest,
        "hw/calibration.json was fitted to other rows: `tpusim fit --out hw/calibration.json --force`"
    );
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/validation.md"))
        .expect("the page");
    let stamp = validation::stamp(&data.digest, calibration);
    assert!(
        page.contains(&stamp),
        "docs/validation.md is not of {stamp}: `tpusim validate --page docs/validation.md --force`"
    );
}
