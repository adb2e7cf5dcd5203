// Joins orders with their payments, up to a day apart.
import java.time.Duration;
import java.time.Instant;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.StreamJoined;
import tools.jackson.databind.json.JsonMapper;import tools.jackson.databind.json.JsonMapper;

class PaidOrders {
    record Order(String id, String shop, long cents, Instant placed) {}

    record Payment(String id, long paid, Instant paid_at) {}

    record Paid(String id, String shop, long cents, long paid) {}

    static <T> Serde<T> json(Class<T> type) {
        var json = new JsonMapper();
        return Serdes.serdeFrom((topic, row) -> json.writeValueAsBytes(row), (topic, row) -> json.readValue(row, type));
    }

    static Topology topology() {
        var builder = new StreamsBuilder();
        var orders = builder.stream("orders", Consumed.with(Serdes.String(), json(Order.class))
            .withTimestampExtractor((record, before) -> ((Order) record.value()).placed().toEpochMilli()));
        var payments = builder.stream("payments", Consumed.with(Serdes.String(), json(Payment.class))
            .withTimestampExtractor((record, before) -> ((Payment) record.value()).paid_at().toEpochMilli()));
        orders.join(payments, (order, payment) -> new Paid(order.id(), order.shop(), order.cents(), payment.paid()),
                JoinWindows.ofTimeDifferenceAndGrace(Duration.ofDays(1), Duration.ofHours(1)),
                StreamJoined.with(Serdes.String(), json(Order.class), json(Payment.class)))
            .to("paid", Produced.with(Serdes.String(), json(Paid.class)));
        return builder.build();
    }

    public static void main(String[] args) {
        var config = new Properties();
        config.putAll(Map.of("application.id", "paid", "bootstrap.servers", "broker:9092"));
        config.put("processing.guarantee", "exactly_once_v2");
        new KafkaStreams(topology(), config).start();
    }
}
